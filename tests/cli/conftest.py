"""A small course in a temporary folder: two lessons, as they ship, and nothing in work/ yet."""

from pathlib import Path

import pytest
from small_notebook import notebook
from typer.testing import CliRunner

from course_lib.cli import app


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    """The root of a checkout, made the current folder."""
    root = tmp_path / "course"
    (root / "course_lib").mkdir(parents=True)
    for name in ("00_start_here", "01_memory_ledger"):
        folder = root / "notebooks" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.ipynb").write_text(notebook(f"'{name}'"))
    (root / "notebooks/01_memory_ledger/config.json").write_text("{}")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def course():
    """Run `course …` in this process; bad input is raised as CourseError."""

    def run(*arguments: str):
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)

    return run
