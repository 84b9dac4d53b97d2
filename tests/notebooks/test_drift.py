"""The committed notebooks are what their sources build. (pytest runs them too: see conftest.py.)"""

from pathlib import Path

import pytest

from course_lib.authoring.build import difference
from course_lib.authoring.lesson import lessons
from course_lib.checks import registry

ROOT = Path(__file__).parents[2]
LESSONS = lessons(ROOT)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_the_notebooks_are_what_the_source_builds(lesson):
    described = registry.exercises(lesson.number) if lesson.number in registry.lessons() else ()
    found = difference(lesson, {exercise.id: exercise for exercise in described})
    assert not found, f"\n{found}\nRun `course build {lesson.number}` and commit what it makes."


def test_every_notebook_has_a_source():
    sources = {lesson.name for lesson in LESSONS}
    for folder in ("solutions", "notebooks"):
        built = {path.name for path in (ROOT / folder).iterdir() if path.is_dir()}
        assert {name for name in built if not name.startswith(".")} <= sources


def test_every_lesson_with_exercises_has_a_source():
    assert set(registry.lessons()) <= {lesson.number for lesson in LESSONS}
