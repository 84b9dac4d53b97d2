"""`course check`: a learner's notebook is run, and its checks are shown in the terminal."""

from dataclasses import dataclass

import pytest
from small_notebook import notebook

from course_lib.checks import registry
from course_lib.cli import workspace
from course_lib.errors import CourseError

MIME = "application/vnd.course.report+json"
# What a real check cell leaves, made here without the exercises of a real lesson.
CHECK = f"""
from IPython.display import display
def check(id, score):
    data = {{"exercise": id, "points": 2, "score": score, "sentence": "s"}}
    display({{"text/plain": f"{{id}}: {{score}} of 2", {MIME!r}: data}}, raw=True)
    if score == 0:
        raise ValueError("failed")
"""
LESSON = "01_memory_ledger/01_memory_ledger.ipynb"


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str = "count"
    total: int = 2


@pytest.fixture
def lesson(root, monkeypatch):
    """Put a notebook with these cells in work/, as lesson 01 with two exercises."""
    exercises = (Exercise("01-first"), Exercise("01-second"))
    monkeypatch.setattr(registry, "lessons", lambda: ("01",))
    monkeypatch.setattr(registry, "exercises", lambda number: exercises)
    workspace.seed(root)

    def put(*cells):
        (root / "work" / LESSON).write_text(notebook(CHECK, *cells))
        return root / "work" / LESSON

    return put


def test_all_passed_is_exit_code_0_and_the_file_stays(lesson, course):
    path = lesson('check("01-first", 2)', "check('01-second', 2)")
    before = path.read_bytes()
    result = course("check", "01")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "01-first: 2 of 2",
        "01-second: 2 of 2",
        "01_memory_ledger: 4 of 4 points",
    ]
    assert path.read_bytes() == before


def test_a_failed_check_and_a_failed_cell_are_shown(lesson, course):
    lesson('check("01-first", 1)', "1 / 0", 'check("01-second", undefined)')
    result = course("check", "01")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "01-first: 1 of 2",
        "01-second · count: its check cell did not run",
        "Cell 3 raised ZeroDivisionError: division by zero",
        "Cell 4 raised NameError: name 'undefined' is not defined",
        "01_memory_ledger: 1 of 4 points",
    ]


def test_a_dead_kernel_and_an_endless_cell_end_in_sentences(lesson, course):
    lesson(
        'check("01-first", 2)',
        "while True: pass",
        "import os; os._exit(1)",
        'check("01-second", 2)',
    )
    result = course("check", "01", "--timeout", "2")
    assert result.exit_code == 1
    assert "01-first: 2 of 2" in result.stdout
    assert "Cell 3 ran longer than 2 s and was interrupted." in result.stdout
    assert "The kernel died" in result.stdout
    assert "2 of 4 points" in result.stdout


def test_saved_outputs_are_no_proof(lesson, course):
    import nbformat

    path = lesson("import os; os._exit(1)", 'check("01-first", 2)')
    saved = nbformat.read(path, as_version=4)
    data = {MIME: {"exercise": "01-first", "points": 2, "score": 2}, "text/plain": "passed"}
    saved.cells[2].outputs = [nbformat.v4.new_output("display_data", data=data)]
    nbformat.write(saved, path)
    result = course("check", "01")
    assert result.exit_code == 1
    assert "0 of 4 points" in result.stdout


def test_the_folder_of_the_notebook_is_the_current_one(lesson, course):
    lesson('open("config.json").close(); check("01-first", 2)', 'check("01-second", 2)')
    assert course("check", f"work/{LESSON}").exit_code == 0


@pytest.mark.parametrize(
    "content, sentence",
    [
        (notebook("print('not the course')"), "is not a notebook of the course"),
        (notebook('check("77-unknown", f)'), "is not a notebook of the course"),
        ("{", "cannot be read as a notebook"),
        ("", "cannot be read as a notebook"),
        ('{"cells": 3}', "cannot be read as a notebook"),
        ("[1, 2]", "cannot be read as a notebook"),
        ("\x89PNG", "cannot be read as a notebook"),
    ],
)
def test_a_file_that_is_no_notebook_of_the_course(lesson, course, content, sentence):
    path = lesson()
    path.write_text(content)
    with pytest.raises(CourseError, match=sentence) as raised:
        course("check", str(path))
    assert "\n" not in str(raised.value)


def test_a_missing_notebook_and_an_unknown_lesson(root, course):
    with pytest.raises(CourseError, match="There is no notebook nowhere.ipynb"):
        course("check", "nowhere.ipynb")
    with pytest.raises(CourseError, match="There is no lesson '55'; the lessons are 00, 01"):
        course("check", "55")
    with pytest.raises(CourseError, match="`course lab` puts it there"):
        course("check", "01")


def test_a_folder_is_no_notebook(root, course):
    (root / "folder.ipynb").mkdir()
    with pytest.raises(CourseError, match="cannot be read as a notebook"):
        course("check", "folder.ipynb")
