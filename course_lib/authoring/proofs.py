"""What the two notebooks must have shown, before they may be committed."""

import ast
import sys

from nbformat import NotebookNode
from nbgrader.utils import determine_grade, is_grade, is_solution

from course_lib.authoring.execute import PICTURES, WIDGET
from course_lib.authoring.leaks import strings
from course_lib.authoring.learner import EXPLORER
from course_lib.authoring.lesson import Lesson


def prove(solution: NotebookNode, lesson: Lesson) -> None:
    """Raise CourseError unless all of it ran, its checks give all points, its explorers can be
    seen without a kernel, and no output names a folder of this machine."""
    for cell in solution.cells:
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None and cell.source.strip():
            raise lesson.refuse(f"cell {cell.id} of the solution has not been run")
        if is_grade(cell):
            score, points = determine_grade(cell)
            if score != points:
                raise lesson.refuse(
                    f"{cell.id} gives the lesson's own solution {score:g} of {points:g} points "
                    "(an error, a partial score, or something on stderr, which nbgrader fails)"
                )
        _refuse_unseen_widgets(cell, lesson)
        for folder in (str(lesson.root), sys.prefix):
            if any(folder in text for text in strings(cell.outputs)):
                raise lesson.refuse(
                    f"cell {cell.id} prints {folder}, a folder of this machine: print what is the "
                    "same everywhere"
                )


def prove_stubs(learners: NotebookNode, lesson: Lesson) -> None:
    """Raise CourseError unless each exercise's cell runs without its solution: only calling what
    it defines may raise."""
    for cell in filter(is_solution, learners.cells):
        try:
            raises = any(isinstance(node, ast.Raise) for node in ast.parse(cell.source).body)
        except SyntaxError:
            raises = True
        if raises:
            raise lesson.refuse(
                f"exercise {cell.id} would fail by itself once its solution is out: indent "
                "### BEGIN SOLUTION as the solution is"
            )


def _refuse_unseen_widgets(cell: NotebookNode, lesson: Lesson) -> None:
    bundles = [output.get("data", {}) for output in cell.outputs]
    seen = any(picture in bundle for bundle in bundles for picture in PICTURES)
    if any(WIDGET in bundle for bundle in bundles) or (
        EXPLORER in cell.metadata.get("tags", ()) and not seen
    ):
        raise lesson.refuse(
            f"cell {cell.id} shows nothing to a reader without a kernel: display HTML or a picture "
            "with the widget"
        )
