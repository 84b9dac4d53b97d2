"""Running the solution: what is kept of its outputs, and how a failing cell is shown."""

import sys

import nbformat
import pytest

from course_lib.authoring import execute as module
from course_lib.authoring.execute import WIDGET, execute
from course_lib.errors import CourseError


def run(lesson, *sources, progress=lambda text: None):
    cells = [nbformat.v4.new_code_cell(s, id=f"cell-{i}") for i, s in enumerate(sources)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"course": {"lesson": "01_toy"}})
    execute(notebook, lesson, lesson.root, progress)
    return notebook


def test_outputs_are_the_same_next_time(lesson):
    bundle = {WIDGET: {}, "text/html": "<p>", "application/vnd.course.report+json": {}}
    notebook = run(
        lesson,
        "import sys; print(1); print(2)",
        f"from IPython.display import display; display({bundle}, raw=True)",
        f"display({ {WIDGET: {}, 'text/plain': 'x'} }, raw=True)",
    )
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    streams, picture, widget = (cell.outputs for cell in notebook.cells)
    assert [output.text for output in streams] == ["1\n2\n"]
    assert set(picture[0].data) == {"text/html"}
    assert WIDGET in widget[0].data  # nothing else would be left; the proofs refuse it
    assert all("execution" not in cell.metadata for cell in notebook.cells)
    assert notebook.metadata == {"course": {"lesson": "01_toy"}}


def test_it_runs_in_this_python_and_in_its_folder(lesson):
    notebook = run(lesson, "import os, sys; print(sys.prefix); print(os.getcwd())")
    assert notebook.cells[0].outputs[0].text.splitlines() == [sys.prefix, str(lesson.root)]


def test_a_failing_cell_is_shown_with_its_error(lesson):
    told = []
    with pytest.raises(CourseError) as failed:
        run(lesson, "n = 0", "# a comment\n1 / n", "n = 2", progress=told.append)
    assert str(failed.value) == (
        "Lesson 01: cell cell-1 failed with ZeroDivisionError: division by zero, in\n"
        "    # a comment\n    1 / n."
    )
    assert told == ["cell 1 of 3", "cell 2 of 3"]


def test_a_failure_on_purpose_keeps_one_line(lesson):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", id="here")])
    notebook.cells[0].metadata["tags"] = ["raises-exception"]
    execute(notebook, lesson, lesson.root, lambda text: None)
    (output,) = notebook.cells[0].outputs
    assert output.traceback == ["ZeroDivisionError: division by zero"]


def test_a_cell_without_end_is_ended(lesson, monkeypatch):
    monkeypatch.setattr(module, "CELL_TIMEOUT", 1)
    with pytest.raises(CourseError, match="cell cell-0 failed with no end after 1 s"):
        run(lesson, "import time; time.sleep(60)")


def test_a_kernel_that_dies_is_a_sentence(lesson):
    with pytest.raises(CourseError, match="cell cell-0 failed with the death of its kernel"):
        run(lesson, "import os; os._exit(1)")
