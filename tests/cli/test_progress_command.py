"""`course progress`: the best score of each exercise, from the learner's own runs."""

import json

import pytest

from course_lib.checks import progress as log
from course_lib.checks import registry
from course_lib.checks.exercise import Case, Exercise
from course_lib.cli import progress
from course_lib.errors import CourseError


def exercise(id: str, points: int) -> Exercise:
    return Exercise(id, "count", "Count.", {"all": points}, len, (Case("empty", ([],)),), ())


@pytest.fixture
def file(root, monkeypatch):
    """The learner's progress file, in a course with one lesson of two exercises."""
    exercises = (exercise("01-first", 2), exercise("01-second", 3))
    monkeypatch.setattr(registry, "lessons", lambda: ("01",))
    monkeypatch.setattr(registry, "exercises", lambda number: exercises)
    (root / "work/.course").mkdir(parents=True)
    return root / "work/.course/progress.jsonl"


def record(id: str, score: int) -> dict:
    return {"exercise": id, "points": 3, "score": score, "sentence": "", "when": "2026-01-01"}


def test_best_is_the_best_and_counts_the_runs():
    records = [record("01-first", 2), record("01-first", 0), record("01-second", 1)]
    assert progress.best(records) == {"01-first": (2, 2), "01-second": (1, 1)}


def test_what_the_checks_recorded_is_shown(file, course):
    log.record(record("01-first", 0), file)
    log.record(record("01-second", 3), file)
    log.record(record("01-second", 1), file)
    result = course("progress")
    assert result.exit_code == 0
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["01-first", "count", "0 of 2", "1"],
        ["01-second", "count", "3 of 3", "2"],
        ["lesson 01", "", "3 of 5", ""],
    ]


def test_without_any_check_it_says_where_to_begin(file, course):
    result = course("progress")
    assert result.exit_code == 0
    assert "No check has been run yet" in result.stdout


def test_a_damaged_file_is_moved_aside_and_the_rest_is_kept(file, course):
    damaged = json.dumps(record("01-first", 2)) + "\n{\n"
    file.write_text(damaged)
    with pytest.raises(CourseError, match="was damaged: it was moved to"):
        course("progress")
    assert [path.read_text() for path in file.parent.glob("*.damaged-*")] == [damaged]
    assert "2 of 2" in course("progress").stdout
