"""What a lesson's notebooks were built from, as a short fingerprint.

It covers the lesson's source and assets, the builder, and every module of the course that the
lesson imports, directly or through others, with the data files beside it. Modules are found by
reading import statements; nothing is imported.
"""

import ast
import hashlib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import jupytext

from course_lib.authoring.lesson import Lesson

OURS = {"course_lib", "grading"}
DATA = {".csv", ".json", ".toml", ".yaml"}


def stamp(lesson: Lesson) -> str:
    """12 hexadecimal digits that change when something changes that the lesson is built from."""
    digest = hashlib.sha256()
    for path in ingredients(lesson):
        digest.update(f"{path.relative_to(lesson.root).as_posix()}\n".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:12]


def ingredients(lesson: Lesson) -> list[Path]:
    """The files that the lesson is built from, sorted."""
    cells = jupytext.read(lesson.source, fmt="py:percent").cells
    todo = [name for cell in cells if cell.cell_type == "code" for name in imports(cell.source)]
    todo += [f"grading.exercises.lesson_{lesson.number}", *_builder(lesson.root)]
    files = {lesson.source, *(lesson.assignment / path for path in lesson.assets())}
    seen = set()
    while todo:
        name = todo.pop()
        path = None if name in seen else _file(lesson.root, name)
        seen.add(name)
        if path is None:
            continue
        files |= {path, *_data(path)}
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        todo += imports(path.read_text(encoding="utf-8"), package)
    return sorted(files)


def imports(code: str, package: str = "") -> Iterator[str]:
    """The course's modules that `code`, a module of `package`, may import; parents come first."""
    lines = (line for line in code.splitlines() if not line.startswith(("%", "!")))  # magics
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:  # running the cell will say so
        return
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package or "_")
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] in OURS:
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _builder(root: Path) -> list[str]:
    paths = (root / "course_lib" / "authoring").glob("*.py")
    return [f"course_lib.authoring.{path.stem}" for path in paths if path.stem != "__init__"]


def _file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def _data(module: Path) -> Iterator[Path]:
    """Data files beside a module, and in a folder `data` beside it."""
    for folder in (module.parent, module.parent / "data"):
        yield from (p for p in folder.glob("*") if p.suffix in DATA and p.is_file())
