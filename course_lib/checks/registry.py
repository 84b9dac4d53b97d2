"""Find an exercise by its id.

The descriptions stand in `grading/exercises/lesson_NN.py`, one file a lesson, each with a tuple
EXERCISES. `grading` is built on this library, so it is found by name here, not imported above.
"""

import difflib
import importlib
import pkgutil
from functools import cache

from course_lib.checks.exercise import Exercise
from course_lib.errors import CourseError

PACKAGE = "grading.exercises"


@cache
def lessons() -> tuple[str, ...]:
    """The numbers of the lessons that have exercises: ("00", "01", …)."""
    modules = pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__)
    prefix = "lesson_"
    return tuple(sorted(m.name.removeprefix(prefix) for m in modules if m.name.startswith(prefix)))


@cache
def exercises(lesson: str) -> tuple[Exercise, ...]:
    """A lesson's exercises, in the order in which the learner meets them."""
    if lesson not in lessons():
        known = ", ".join(lessons())
        raise CourseError(f"No lesson {lesson!r} has exercises; there are {known}.")
    return importlib.import_module(f"{PACKAGE}.lesson_{lesson}").EXERCISES


def find(id: str) -> Exercise:
    """The exercise with this id; CourseError names the nearest ones where there is none."""
    known = {exercise.id: exercise for lesson in lessons() for exercise in exercises(lesson)}
    if id in known:
        return known[id]
    near = difflib.get_close_matches(str(id), known, n=3) or sorted(known)
    raise CourseError(f"No exercise {id!r}; did you mean {' or '.join(near)}?")
