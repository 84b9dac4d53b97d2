"""Keep solutions out of what learners get.

A solution's *secrets* are its lines that say something of their own, and its whole text. None of
them may show in a learner's file, wherever: in a source, an output, metadata, or another file of
the folder; plain, or escaped as HTML.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode

from course_lib.authoring.lesson import Lesson
from course_lib.authoring.rules import MARKER

REGION = re.compile(r"BEGIN (SOLUTION|HIDDEN TESTS)[^\n]*\n(?P<text>.*?)\n[^\n]*END \1", re.DOTALL)
# A line shorter than this, an import or the head of a block may stand in any program.
DISTINCTIVE = 20
COMMON = re.compile(r"(import|from) .*|.*:")
# A whole solution may be shorter than a line that is distinctive.
WHOLE = 12


def secrets(source: NotebookNode) -> list[str]:
    """What must not show: lines and whole texts of solutions and hidden tests, without indents."""
    regions = [_flat(m["text"]) for cell in source.cells for m in REGION.finditer(cell.source)]
    lines = [line for region in regions for line in region.splitlines()]
    own = [line for line in lines if len(line) >= DISTINCTIVE and not COMMON.fullmatch(line)]
    return own + [region for region in regions if len(region) >= WHOLE]


def refuse_leaks(notebook: NotebookNode, secrets: list[str], lesson: Lesson) -> None:
    """Raise CourseError if a learner's notebook shows a secret or one of nbgrader's markers."""
    for cell in notebook.cells:
        _refuse(strings(cell), secrets, lesson, f"cell {cell.id} of the learner's notebook")
    _refuse(strings(notebook.metadata), secrets, lesson, "the learner's notebook's metadata")


def refuse_leaks_in_files(folder: Path, secrets: list[str], lesson: Lesson) -> None:
    """The same for the other files that learners get, read as text."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".ipynb":
            text = path.read_text(encoding="utf-8", errors="ignore")
            _refuse([text], secrets, lesson, path.relative_to(folder).as_posix())


def _refuse(texts: Iterator[str] | list[str], secrets: list[str], lesson: Lesson, where: str):
    for text in map(_flat, texts):
        marker = MARKER.search(text)
        found = marker[0] if marker else next((s for s in secrets if s in text), None)
        if found:
            raise lesson.refuse(f"{where} shows text of a solution, {found!r}")


def _flat(text: str) -> str:
    """Text without indents and empty lines, and with HTML's escapes undone."""
    lines = (line.strip() for line in html.unescape(text).splitlines())
    return "\n".join(line for line in lines if line)


def strings(value) -> Iterator[str]:
    """Every string in a notebook's data, keys too; a list of strings also as one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        yield "".join(item for item in value if isinstance(item, str))
        for item in value:
            yield from strings(item)
