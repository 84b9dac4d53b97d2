"""Every check fails on the stub and on each misconception, and passes two correct solutions."""

import pytest

from course_lib.checks import registry
from course_lib.checks.proving import prove

ALL = [exercise for lesson in registry.lessons() for exercise in registry.exercises(lesson)]


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_a_check_refuses_what_is_wrong_and_accepts_what_is_right(exercise):
    broken = [proof for proof in prove(exercise) if not proof.held]
    assert not broken, "\n".join(
        f"{p.answer}: expected {p.expected!r}, got {p.got!r}" for p in broken
    )


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_an_exercise_has_enough_to_be_proven_with(exercise):
    # One mistake may come in several forms; they share its hint.
    assert len({misconception.hint for misconception in exercise.misconceptions}) >= 5
    assert exercise.alternatives, "a different correct solution is missing"
    assert {case.part for case in exercise.all_cases(0)} == set(exercise.points)


def test_ids_are_unique_and_belong_to_their_lesson():
    ids = [exercise.id for exercise in ALL]
    assert len(set(ids)) == len(ids)
    for lesson in registry.lessons():
        assert all(exercise.id.startswith(f"{lesson}-") for exercise in registry.exercises(lesson))
