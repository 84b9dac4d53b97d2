"""Where the files of a lesson lie."""

from dataclasses import dataclass
from pathlib import Path

from course_lib.errors import CourseError

# What Jupyter and Python leave in a folder; nbgrader leaves it out too.
NOT_ASSETS = {".ipynb_checkpoints", "__pycache__"}


@dataclass(frozen=True)
class Lesson:
    """A lesson by its name, 01_memory_ledger, in the course's folder `root`."""

    root: Path
    name: str

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def source(self) -> Path:
        return self.root / "solutions" / f"{self.name}.py"

    @property
    def assignment(self) -> Path:
        """nbgrader's source folder: the executed solution, and assets that ship with the lesson."""
        return self.root / "solutions" / self.name

    @property
    def solution(self) -> Path:
        return self.assignment / f"{self.name}.ipynb"

    @property
    def released(self) -> Path:
        """nbgrader's release folder: the learner's notebook, and the same assets."""
        return self.root / "notebooks" / self.name

    @property
    def learner(self) -> Path:
        return self.released / f"{self.name}.ipynb"

    def assets(self) -> list[Path]:
        """Files beside the solution (data, pictures), as paths below the assignment's folder."""
        below = (path.relative_to(self.assignment) for path in self.assignment.rglob("*"))
        return sorted(
            path
            for path in below
            if (self.assignment / path).is_file()
            and path.suffix != ".ipynb"
            and not NOT_ASSETS & set(path.parts)
        )

    def refuse(self, what: str) -> CourseError:
        """The error that says what is wrong with this lesson."""
        return CourseError(f"Lesson {self.number}: {what}.")


def lessons(root: Path) -> list[Lesson]:
    """All lessons that have a source, in order."""
    return [
        Lesson(root, path.stem) for path in sorted((root / "solutions").glob("[0-9][0-9]_*.py"))
    ]


def choose(root: Path, names: list[str] | None) -> list[Lesson]:
    """The lessons named as 01, 1 or 01_memory_ledger; all where none is named."""
    there = lessons(root)
    if not names:
        return there
    chosen = []
    for name in names:
        found = [x for x in there if name in (x.name, x.number, x.number.removeprefix("0"))]
        if not found:
            known = ", ".join(x.number for x in there) or "none"
            raise CourseError(f"There is no lesson {name!r} in solutions/, which has {known}.")
        chosen += [lesson for lesson in found if lesson not in chosen]
    return chosen
