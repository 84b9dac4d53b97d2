"""What a check cell calls: `check("01-block", block_parameters)`."""

import inspect
import os
import random
import re
import textwrap

from course_lib.checks import panel, progress
from course_lib.checks.answering import outcomes
from course_lib.checks.exercise import Answer, Exercise
from course_lib.checks.judging import Report, expect, judge
from course_lib.checks.registry import find
from course_lib.errors import CourseError


class CheckFailed(Exception):
    """An answer scored nothing. The panel above it has said why, so no traceback is shown."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


class PartialCredit(float):
    """The points of the parts that passed. nbgrader reads them from the cell's result."""

    def __repr__(self) -> str:
        return f"{float(self):g}"


def evaluate(exercise: Exercise, answer: Answer, seed: int) -> Report:
    """Run the answer on the cases of this seed and judge it, here in one process."""
    cases = exercise.all_cases(seed)
    expected = expect(exercise, cases)
    got = outcomes(answer, cases, exercise.run, exercise.off_limits())
    return judge(exercise, seed, cases, expected, got)


def check(id: str, answer: Answer, *, seed: int | None = None) -> PartialCredit | None:
    """Check an answer, show the panel, remember the score.

    Each call draws fresh cases; `seed`, an int from a panel, repeats that panel's cases.
    Raises CheckFailed when nothing was scored, so that a grader gives 0; returns the points
    where some parts passed; returns nothing when all did.
    """
    from IPython.display import display

    exercise = find(id)
    if not callable(answer):
        raise CourseError(
            f"check({id!r}, …) takes your function itself, without calling it; "
            f"it was given {answer!r}."
        )
    report = evaluate(exercise, answer, random.randrange(10**6) if seed is None else seed)
    progress.record(report.to_dict())
    display(panel.bundle(report, _solution(exercise, answer)), raw=True)
    if report.passed:
        return None
    if report.score:
        return PartialCredit(report.score)
    raise CheckFailed(f"{id} scored 0 of {report.points} points")


def _solution(exercise: Exercise, answer: Answer) -> str:
    """The reference's source, under the answer's name, ready to be put into the notebook.

    COURSE_HIDE_SOLUTIONS=1 keeps it out of a graded class's panels.
    """
    if os.environ.get("COURSE_HIDE_SOLUTIONS"):
        return ""
    reference = exercise.reference
    source = textwrap.dedent(inspect.getsource(reference))
    module = inspect.getmodule(reference)
    if module.__name__.startswith("course_lib."):  # the notebook has the module, not its insides
        for beside, _ in inspect.getmembers(module, inspect.isfunction):
            called = rf"(?<![\w.])(?<!def ){beside}\("
            source = re.sub(called, f"{module.__name__.split('.')[-1]}.{beside}(", source)
    name = getattr(answer, "__name__", "")
    name = name if name.isidentifier() else reference.__name__
    return re.sub(rf"\bdef {reference.__name__}\(", f"def {name}(", source, count=1)
