"""`course build`: what it says, what it leaves alone, how it exits."""

import pytest
import typer
from typer.testing import CliRunner

from course_lib.checks import registry
from course_lib.cli.build import build
from course_lib.errors import CourseError

command = typer.Typer()
command.command()(build)


@pytest.fixture
def run(built, toys, monkeypatch):
    """run(*arguments) in the toy course's folder, with the toy registry."""
    monkeypatch.chdir(built.root)
    monkeypatch.setattr(registry, "lessons", lambda: ("01",))
    monkeypatch.setattr(registry, "exercises", lambda number: tuple(toys.values()))
    return lambda *arguments: CliRunner().invoke(command, arguments)


def test_a_lesson_that_is_up_to_date_is_not_built(built, run):
    before = built.solution.stat().st_mtime_ns
    done = run("01")
    assert (done.exit_code, done.output) == (0, "01_toy: up to date\n")
    assert built.solution.stat().st_mtime_ns == before


def test_only_what_changed_is_built(built, run, edit):
    (built.root / "solutions" / "02_other.py").write_text("# %%\n1\n")
    edit(built, "the lesson goes on", "the lesson goes further")
    assert run("01").output == "01_toy: built\n"
    assert "goes further" in built.learner.read_text()
    assert not (built.root / "notebooks" / "02_other").exists()
    assert run().output == "01_toy: up to date\n02_other: built\n"


def test_force_builds_what_is_up_to_date(run):
    assert run("--force").output == "01_toy: built\n"


def test_check_shows_the_difference_and_fails(built, run, edit):
    assert run("--check").exit_code == 0
    edit(built, "the lesson goes on", "the lesson goes further")
    done = run("--check", "--force")
    assert done.exit_code == 1
    assert done.output.startswith("01_toy: differs\n--- solutions/01_toy/01_toy.ipynb\n")
    assert "goes further" not in built.learner.read_text()


def test_an_unknown_lesson_is_bad_input(run):
    assert isinstance(run("07").exception, CourseError)
