"""What a lesson's source must keep to. Each rule raises one sentence that names lesson and cell.

Three kinds: an exercise is whole (heading, stub with docstring and solution region, then its
check); lesson and registry agree (ids, titles, points); cells are short, one idea a cell.
"""

import ast
import re
from collections.abc import Mapping
from statistics import median

from nbformat import NotebookNode

from course_lib.authoring.lesson import Lesson
from course_lib.authoring.source import describe
from course_lib.checks.exercise import Exercise

CODE_LINES, PROSE_WORDS = 25, 120  # of one cell
MEDIAN_LINES, MEDIAN_WORDS = 10, 70  # of a lesson's cells

MARKER = re.compile(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS|MARK SCHEME)")
HEADING = re.compile(r"^### Exercise (\S+): (.+) \((\d+) points?\)$", re.MULTILINE)


def keep(source: NotebookNode, lesson: Lesson, exercises: Mapping[str, Exercise]) -> None:
    """Raise CourseError for the first rule that the source breaks. `exercises`: the registry's."""
    _exercises_are_known(source, lesson, exercises)
    _exercises_are_whole(source, lesson)
    _headings_agree(source, lesson, exercises)
    _cells_are_short(source, lesson)
    _folder_is_clean(lesson)


def _named(source: NotebookNode, part: str) -> dict[str, int]:
    """Where the exercises' or the checks' cells stand: {id: index}."""
    return {c.metadata[part]: i for i, c in enumerate(source.cells) if part in c.metadata}


def _exercises_are_known(source, lesson, exercises) -> None:
    for part in ("exercise", "check"):
        there = [cell.metadata[part] for cell in source.cells if part in cell.metadata]
        for id in there:
            if there.count(id) > 1:
                raise lesson.refuse(f"the {part} {id} is there {there.count(id)} times, not once")
            if id not in exercises:
                raise lesson.refuse(
                    f"the {part} {id} is not in the registry: describe it in "
                    f"grading/exercises/lesson_{lesson.number}.py, or correct the id"
                )
    here, checks = _named(source, "exercise"), _named(source, "check")
    for id in exercises:
        if id not in here:
            raise lesson.refuse(f"the registry's exercise {id} has no cell in the lesson")
        if id not in checks:
            raise lesson.refuse(f"the exercise {id} has no check after it")
        if checks[id] < here[id]:
            raise lesson.refuse(f"the check {id} stands before its exercise")
    for id in checks:
        if id not in here:
            raise lesson.refuse(f"the check {id} has no exercise before it")


def _exercises_are_whole(source, lesson) -> None:
    for cell in source.cells:
        markers = MARKER.findall(cell.source)
        if "exercise" in cell.metadata:
            if markers != [("BEGIN", "SOLUTION"), ("END", "SOLUTION")]:
                raise lesson.refuse(
                    f"{describe(cell)} needs one region from ### BEGIN SOLUTION to ### END SOLUTION"
                )
            for definition in _definitions(cell, lesson):
                if not ast.get_docstring(definition):
                    raise lesson.refuse(
                        f"{describe(cell)}: {definition.name} has no docstring, which should give "
                        "inputs, shapes, units and an example"
                    )
        elif markers:
            raise lesson.refuse(
                f"{describe(cell)} has a marker {' '.join(markers[0])}, which belongs into an "
                "exercise's cell only"
            )
        if "check" in cell.metadata and _checked(cell) != cell.metadata["check"]:
            raise lesson.refuse(
                f"{describe(cell)} should be the one line check({cell.metadata['check']!r}, …)"
            )


def _definitions(cell: NotebookNode, lesson: Lesson) -> list:
    """The functions and classes that an exercise's cell defines; at least one."""
    try:
        body = ast.parse(cell.source).body
    except SyntaxError as error:
        raise lesson.refuse(f"{describe(cell)} is not Python: {error}") from None
    found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    if not found:
        raise lesson.refuse(f"{describe(cell)} defines no function or class with a docstring")
    return found


def _checked(cell: NotebookNode) -> str | None:
    """The id that a check's cell passes to `check`, where that is all it does."""
    match = re.fullmatch(r"check\(\s*(['\"])(?P<id>[^'\"]+)\1\s*,.+\)", cell.source.strip())
    return match["id"] if match else None


def _headings_agree(source, lesson, exercises) -> None:
    headings = {
        id: (index, title, int(points))
        for index, cell in enumerate(source.cells)
        if cell.cell_type == "markdown"
        for id, title, points in HEADING.findall(cell.source)
    }
    for id, exercise in exercises.items():
        points = f"{exercise.total} point{'' if exercise.total == 1 else 's'}"
        wanted = f"### Exercise {id}: {exercise.title} ({points})"
        index, title, total = headings.pop(id, (len(source.cells), "", 0))
        if index > _named(source, "exercise")[id]:
            raise lesson.refuse(f"the exercise {id} has no heading before it: {wanted}")
        if (title, total) != (exercise.title, exercise.total):
            raise lesson.refuse(
                f"the heading of exercise {id} says {title!r} and {total} points, where the "
                f"registry has {exercise.title!r} and {exercise.total}"
            )
    for id in headings:
        raise lesson.refuse(f"there is a heading for the exercise {id}, which the registry lacks")


def code_lines(cell: NotebookNode) -> int:
    """Lines that a reader reads: neither empty nor a marker."""
    return sum(bool(x.strip()) and not MARKER.search(x) for x in cell.source.splitlines())


def prose_words(cell: NotebookNode) -> int:
    """Words outside fenced code; signs such as | and = are none."""
    prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(re.search(r"\w", word)) for word in prose.split())


def _cells_are_short(source, lesson) -> None:
    for kind, size, unit, limit, middle in (
        ("code", code_lines, "lines", CODE_LINES, MEDIAN_LINES),
        ("markdown", prose_words, "words", PROSE_WORDS, MEDIAN_WORDS),
    ):
        cells = [cell for cell in source.cells if cell.cell_type == kind]
        for cell in cells:
            if size(cell) > limit and not str(cell.metadata.get("long", "")).strip():
                raise lesson.refuse(
                    f"{describe(cell)} has {size(cell)} {unit}, and {limit} is the limit: split "
                    'it, or state the reason in its header line, long="…"'
                )
        typical = median(map(size, cells)) if cells else 0
        if typical > middle:
            raise lesson.refuse(
                f"half of its {kind} cells have {typical:g} {unit} or more, where the median may "
                f"be {middle}: split the long ones"
            )


def _folder_is_clean(lesson: Lesson) -> None:
    for path in lesson.assets():
        if path.suffix == ".py":
            raise lesson.refuse(
                f"{path} lies inside solutions/{lesson.name}/, from where nbgrader would give it "
                f"to learners: the source is solutions/{lesson.name}.py, beside the folder"
            )
