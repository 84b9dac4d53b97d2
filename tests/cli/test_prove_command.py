"""`course prove` lists every proof, and fails when one does."""

from dataclasses import replace

from typer.testing import CliRunner

from course_lib.checks import registry
from course_lib.checks.exercise import Misconception
from course_lib.cli import app
from grading.exercises import lesson_00


def test_it_lists_the_stub_each_misconception_and_each_solution(monkeypatch):
    monkeypatch.setattr(registry, "exercises", lambda lesson: (lesson_00.GIB,))
    result = CliRunner().invoke(app, ["prove", "00"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == 1 + 1 + len(lesson_00.GIB.misconceptions) + 2 + 1
    assert lines[-1] == "Every check held."


def test_a_misconception_that_the_check_accepts_is_found(monkeypatch):
    wrong = Misconception("really right", lesson_00.gib, "This hint never comes.")
    exercise = replace(lesson_00.GIB, misconceptions=(wrong,))
    monkeypatch.setattr(registry, "exercises", lambda lesson: (exercise,))
    result = CliRunner().invoke(app, ["prove", "00"])
    assert result.exit_code == 1
    assert "FAILED really right" in result.output and "1 proofs failed" in result.output
