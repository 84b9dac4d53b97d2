"""What the executed notebooks have to show before they are committed."""

import sys

import nbformat
import pytest

from course_lib.authoring.proofs import prove, prove_stubs
from course_lib.errors import CourseError

WIDGET = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}


@pytest.fixture
def solution(built):
    return nbformat.read(built.solution, as_version=4)


def cell(notebook, id):
    return next(cell for cell in notebook.cells if cell.id == id)


def output(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def refuse(solution, lesson, sentence):
    with pytest.raises(CourseError, match=f"^Lesson 01: {sentence}"):
        prove(solution, lesson)


def test_the_toy_lesson_is_proved(solution, built):
    prove(solution, built)


def test_a_cell_that_was_not_run_is_refused(solution, built):
    solution.cells[-1].execution_count = None
    refuse(solution, built, "cell code-0aa051dc of the solution has not been run")


@pytest.mark.parametrize(
    "given, score",
    [
        (nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]), 0),
        (nbformat.v4.new_output("stream", name="stderr", text="a warning"), 0),
        (nbformat.v4.new_output("execute_result", {"text/plain": "1"}), 1),
    ],
)
def test_a_check_that_does_not_give_all_points_is_refused(solution, built, given, score):
    cell(solution, "check-01-double").outputs = [given]
    refuse(solution, built, f"check-01-double gives the lesson's own solution {score} of 2 points")


def test_a_widget_that_needs_a_kernel_is_refused(solution, built):
    solution.cells[-1].outputs = [nbformat.v4.new_output("display_data", WIDGET)]
    refuse(solution, built, "cell code-0aa051dc shows nothing to a reader without a kernel")


def test_an_explorer_without_a_picture_is_refused(solution, built):
    explorer = next(c for c in solution.cells if c.metadata.get("tags") == ["explorer"])
    del explorer.outputs[0].data["text/html"]
    refuse(solution, built, f"cell {explorer.id} shows nothing to a reader without a kernel")


def test_a_folder_of_this_machine_is_refused(solution, built):
    for folder in (built.root, sys.prefix):
        solution.cells[-1].outputs = [output(f"loaded from {folder}/x")]
        refuse(solution, built, f"cell code-0aa051dc prints {folder}")


@pytest.mark.parametrize("stub", ["raise NotImplementedError()", "  raise NotImplementedError()"])
def test_a_stub_that_fails_by_itself_is_refused(built, stub):
    learners = nbformat.read(built.learner, as_version=4)
    prove_stubs(learners, built)
    double = cell(learners, "01-double")
    double.source = double.source.splitlines()[0] + "\n    'Twice n.'\n" + stub
    with pytest.raises(CourseError, match="^Lesson 01: exercise 01-double would fail by itself"):
        prove_stubs(learners, built)
