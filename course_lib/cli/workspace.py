"""Where the learner's work lies, and how lessons come to it.

`notebooks/` holds the lessons as they ship; `work/` holds the learner's copies, and is the
learner's alone. A file is written there only where there is none; a newer version is announced,
never laid over the old one. `work/.course/` remembers which version of each file was last given:

    work/01_memory_ledger/01_memory_ledger.ipynb                        the learner's
    work/01_memory_ledger/01_memory_ledger.2026-01-31_180000.ipynb      kept by `course reset`
    work/.course/given.json                                             {path: sha256}
    work/.course/progress.jsonl                                         see checks.progress
"""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from course_lib.errors import CourseError

FOLDER = ".course"  # also what checks.progress looks for
GIVEN = "given.json"
NOT_SHIPPED = {".ipynb_checkpoints", "__pycache__"}


@dataclass(frozen=True)
class Lesson:
    """A lesson as it ships: notebooks/NN_name/, with NN_name.ipynb in it."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def notebook(self) -> str:
        """The notebook's path below notebooks/, and below work/."""
        return f"{self.name}/{self.name}.ipynb"

    def files(self) -> list[Path]:
        """All that ships with the lesson, as paths below notebooks/."""
        return sorted(
            path.relative_to(self.folder.parent)
            for path in self.folder.rglob("*")
            if path.is_file() and not NOT_SHIPPED & set(path.parts)
        )


def find_root(start: Path | None = None) -> Path:
    """The checkout that `start`, by default the current folder, is in; else this code's own."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents, Path(__file__).resolve().parents[2]):
        if (folder / "notebooks").is_dir() and (folder / "course_lib").is_dir():
            return folder
    raise CourseError(
        f"{start} is not in a checkout of the course, where notebooks/ lies beside course_lib/: "
        "go to the folder that git cloned and repeat the command."
    )


def lessons(root: Path) -> list[Lesson]:
    """All lessons that ship, in order."""
    folders = sorted((root / "notebooks").glob("[0-9][0-9]_*"))
    return [Lesson(folder) for folder in folders if (folder / f"{folder.name}.ipynb").is_file()]


def find_lesson(root: Path, name: str) -> Lesson:
    """The lesson that a learner names as 01, 1 or 01_memory_ledger."""
    there = lessons(root)
    for lesson in there:
        if name in (lesson.name, lesson.number, lesson.number.removeprefix("0")):
            return lesson
    known = ", ".join(lesson.number for lesson in there) or "none: run `make build` first"
    raise CourseError(f"There is no lesson {name!r}; the lessons are {known}.")


def seed(root: Path) -> list[str]:
    """Put into work/ what is not there yet. Returns what to tell the learner, a sentence a line."""
    with _disk(root):
        said, given = _read_given(root)
        for lesson in lessons(root):
            new = _seed_lesson(root, lesson, given)
            if any(given[key] != sha for key, sha in _shipped(root, lesson).items()):
                said.append(
                    f"Lesson {lesson.number} has a newer version; "
                    f"`course reset {lesson.number} --beside` puts it beside your work."
                )
            elif new:
                said.append(f"Lesson {lesson.number} is in work/{lesson.name}.")
        _write_given(root, given)
    return said


def reset(root: Path, lesson: Lesson) -> list[str]:
    """Keep the learner's files under dated names and put fresh ones in their place."""
    with _disk(root):
        said, given = _read_given(root)
        for mine, _ in _changed(root, lesson):
            kept = _reserve(mine, "")
            mine.replace(kept)  # onto the empty file that was just reserved
            said.append(f"Your {mine.name} is kept as {kept.relative_to(root)}.")
        _seed_lesson(root, lesson, given)
        _write_given(root, given | _shipped(root, lesson))
    return [*said, f"work/{lesson.notebook} is fresh; if it is open, reload it from disk."]


def beside(root: Path, lesson: Lesson) -> list[str]:
    """Put the version that ships beside the learner's, under a dated name."""
    with _disk(root):
        said, given = _read_given(root)
        for mine, shipped in _changed(root, lesson):
            new = _reserve(mine, "new-")
            new.write_bytes(shipped.read_bytes())
            said.append(f"The version that ships now is {new.relative_to(root)}.")
        _seed_lesson(root, lesson, given)
        _write_given(root, given | _shipped(root, lesson))
    return said or [f"Your lesson {lesson.number} is the version that ships now."]


def digest(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _seed_lesson(root: Path, lesson: Lesson, given: dict[str, str]) -> bool:
    """Copy what is missing, noting it in `given`. Was anything missing?"""
    new = False
    for key, sha in _shipped(root, lesson).items():
        mine = root / "work" / key
        if not mine.exists():
            _write_new(mine, (root / "notebooks" / key).read_bytes())
            new = True
        if key not in given or digest(mine) == sha:
            given[key] = sha  # a file of unknown origin counts as the version of today
    return new


def _shipped(root: Path, lesson: Lesson) -> dict[str, str]:
    return {file.as_posix(): digest(root / "notebooks" / file) for file in lesson.files()}


def _changed(root: Path, lesson: Lesson) -> list[tuple[Path, Path]]:
    """The learner's files that are not what ships, each with the one that ships."""
    pairs = [(root / "work" / file, root / "notebooks" / file) for file in lesson.files()]
    return [pair for pair in pairs if pair[0].exists() and digest(pair[0]) != digest(pair[1])]


@contextlib.contextmanager
def _disk(root: Path):
    """A disk that is full or may not be written becomes a sentence."""
    try:
        yield
    except OSError as error:
        raise CourseError(
            f"{error.filename or root / 'work'} could not be written ({error.strerror}): make "
            "room or write access there, then repeat the command."
        ) from error


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet; whatever stops it, no half of a file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as handle:
        try:
            handle.write(content)
            handle.flush()
        except BaseException:
            path.unlink()
            raise


def _reserve(path: Path, mark: str) -> Path:
    """A new empty file beside `path` with the date in its name; no two calls get the same."""
    stem = f"{path.stem}.{mark}{datetime.now():%Y-%m-%d_%H%M%S}"
    number = 1
    while True:
        reserved = path.with_name(f"{stem}{f'-{number}' if number > 1 else ''}{path.suffix}")
        try:
            reserved.touch(exist_ok=False)
            return reserved
        except FileExistsError:
            number += 1


def _read_given(root: Path) -> tuple[list[str], dict[str, str]]:
    """What was given, and a sentence where the file was damaged and had to be moved aside."""
    path = root / "work" / FOLDER / GIVEN
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return [], {}
    try:
        given = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict):
        return [], given
    aside = _reserve(path, "damaged-")
    path.replace(aside)
    return [f"{path.relative_to(root)} was damaged and is kept as {aside.name}."], {}


def _write_given(root: Path, given: dict[str, str]) -> None:
    path = root / "work" / FOLDER / GIVEN
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(given, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
