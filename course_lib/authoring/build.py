"""Build a lesson: in a temporary folder, checked, then swapped in.

Whatever goes wrong on the way, the notebooks that were there stay whole. What is derived from the
source alone (texts, metadata, ids) can be compared with the committed notebooks without running
them: that is `difference`, for `course build --check`, for the tests, and for leaving out lessons
that are up to date.
"""

import difflib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.authoring.execute import execute
from course_lib.authoring.leaks import refuse_leaks, refuse_leaks_in_files, secrets
from course_lib.authoring.learner import copy_assets, release
from course_lib.authoring.lesson import Lesson
from course_lib.authoring.proofs import prove, prove_stubs
from course_lib.authoring.rules import keep
from course_lib.authoring.source import expand, read
from course_lib.authoring.stamp import stamp
from course_lib.checks.exercise import Exercise
from course_lib.errors import CourseError

DIFF_LINES = 30

Exercises = Mapping[str, Exercise]


def build(
    lesson: Lesson, exercises: Exercises, progress: Callable[[str], None] = lambda text: None
) -> None:
    """Build both notebooks and put them in place. `exercises`: the registry's for this lesson.

    Raises CourseError, with one sentence, for everything that a lesson may be refused for.
    """
    solution, hidden = derive(lesson, exercises)
    with _workshop(lesson) as work:
        room = work / "room"  # what the lesson's cells leave behind does not ship
        copy_assets(lesson, room)
        execute(solution, lesson, room, progress)
        prove(solution, lesson)
        progress("the learner's notebook")
        released = _learners(solution, hidden, lesson, work / "course")
        executed = work / lesson.solution.name
        nbformat.write(solution, executed)
        swap([(executed, lesson.solution), (released, lesson.released)], work)


def derive(lesson: Lesson, exercises: Exercises) -> tuple[NotebookNode, list[str]]:
    """The solution notebook without outputs, and the text that learners must not see."""
    source = read(lesson)
    keep(source, lesson, exercises)
    notebook = expand(source, lesson, exercises)
    notebook.metadata.course["stamp"] = stamp(lesson)
    return notebook, secrets(source)


def difference(lesson: Lesson, exercises: Exercises) -> str:
    """How the committed notebooks differ from what the source gives: a short diff, or nothing.

    The solution's outputs are taken as they are; the learner's notebook, which is made of it, has
    to be the same to the byte.
    """
    expected, hidden = derive(lesson, exercises)
    if not (lesson.solution.is_file() and lesson.learner.is_file()):
        return f"{lesson.name} has not been built yet"
    try:
        committed = nbformat.read(lesson.solution, as_version=4)
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        return f"{lesson.solution.name} is not a notebook: {str(error).splitlines()[0]}"
    found = _diff(_bare(committed), _bare(expected), lesson.solution, lesson)
    if found:
        return found
    if committed.metadata.course.get("stamp") != expected.metadata.course.stamp:
        return f"{lesson.name} was built before its source, its library or the builder changed"
    try:
        prove(committed, lesson)
        with _workshop(lesson) as work:
            return _folder_diff(lesson, _learners(committed, hidden, lesson, work))
    except CourseError as error:
        return str(error)


def swap(moves: list[tuple[Path, Path]], aside: Path) -> None:
    """Move each new file or folder to its place; all of them, or none.

    What was there goes to the folder `aside`, and comes back if a later move fails.
    """
    done = []
    try:
        for new, target in moves:
            kept = aside / f"old-{len(done)}"
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                os.rename(target, kept)
            done.append((target, kept))
            os.rename(new, target)
    except BaseException:
        for target, kept in reversed(done):
            if target.exists():
                os.rename(target, kept.with_suffix(".failed"))
            if kept.exists():
                os.rename(kept, target)
        raise


@contextmanager
def _workshop(lesson: Lesson) -> Iterator[Path]:
    """A temporary folder on the same disk, so that a finished lesson can be moved, not copied."""
    folder = lesson.root / "build"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{lesson.name}-", dir=folder) as work:
        yield Path(work)


def _learners(solution: NotebookNode, hidden: list[str], lesson: Lesson, work: Path) -> Path:
    """The release folder, made by nbgrader and searched for leaks."""
    released = release(solution, lesson, work)
    notebook = nbformat.read(released / lesson.learner.name, as_version=4)
    nbformat.validate(notebook)
    prove_stubs(notebook, lesson)
    refuse_leaks(notebook, hidden, lesson)
    refuse_leaks_in_files(released, hidden, lesson)
    return released


def _bare(notebook: NotebookNode) -> str:
    """A notebook's text without its stamp and without what only running it can tell."""
    copy = nbformat.from_dict(notebook)
    copy.metadata.get("course", {}).pop("stamp", None)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(copy)


def _folder_diff(lesson: Lesson, released: Path) -> str:
    """The first difference between the committed release folder and the one just made."""
    old, new = (
        {path.relative_to(folder) for path in folder.rglob("*") if _ships(path)}
        for folder in (lesson.released, released)
    )
    for path in sorted(old ^ new):
        return (
            f"notebooks/{lesson.name}/{path} {'should not be' if path in old else 'is not'} there"
        )
    for path in sorted(new):
        was, now = (lesson.released / path).read_bytes(), (released / path).read_bytes()
        if was.replace(b"\r\n", b"\n") != now.replace(b"\r\n", b"\n"):
            texts = (data.decode(errors="replace") for data in (was, now))
            return _diff(*texts, lesson.released / path, lesson)
    return ""


def _ships(path: Path) -> bool:
    return path.is_file() and ".ipynb_checkpoints" not in path.parts


def _diff(was: str, now: str, path: Path, lesson: Lesson) -> str:
    name = path.relative_to(lesson.root).as_posix()
    lines = list(
        difflib.unified_diff(
            was.splitlines(),
            now.splitlines(),
            name,
            f"{name} as its source gives it",
            n=1,
            lineterm="",
        )
    )
    more = len(lines) - DIFF_LINES
    return "\n".join([*lines[:DIFF_LINES], *([f"… and {more} lines more"] if more > 0 else [])])
