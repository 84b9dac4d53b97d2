"""Prove that a check can fail, and can pass: the stub, each misconception, each solution.

`course prove` prints the list; the tests assert it.
"""

from dataclasses import dataclass

from course_lib.checks.answering import outcomes
from course_lib.checks.checking import evaluate
from course_lib.checks.exercise import Exercise
from course_lib.checks.judging import LIBRARY, Report, expect, judge


@dataclass(frozen=True)
class Proof:
    """One answer put to a check: what should come of it, and whether it did."""

    exercise: str
    answer: str
    expected: str
    held: bool
    got: str


def stub(*_: object) -> object:
    """What a learner's notebook holds before anything was solved."""
    raise NotImplementedError("write me")


def prove(exercise: Exercise, seed: int = 1) -> list[Proof]:
    """Put the stub, every misconception and every correct solution to the check."""
    wrong = [("the unsolved stub", stub, f"Not solved yet: {exercise.task}")]
    wrong += [(each.name, each.answer, each.hint) for each in exercise.misconceptions]
    right = [exercise.reference, *exercise.alternatives]
    return [
        *(_refused(exercise, seed, *each) for each in wrong),
        *([_calls_the_library(exercise, seed)] if exercise.library else []),
        *(_accepted(exercise, seed, n, each) for n, each in enumerate(right, start=1)),
    ]


def _refused(exercise, seed, name, answer, sentence) -> Proof:
    report = _judge(exercise, seed, answer)
    held = not report.passed and report.sentence == sentence
    return Proof(exercise.id, name, f"fails: {sentence}", held, report.sentence or "passed")


def _accepted(exercise, seed, number, answer) -> Proof:
    report = _judge(exercise, seed, answer)
    name = f"correct solution {number}"
    return Proof(exercise.id, name, "passes", report.passed, report.sentence or "passed")


def _calls_the_library(exercise, seed) -> Proof:
    report = evaluate(exercise, exercise.reference, seed)
    held = report.score == 0 and report.misconception == LIBRARY
    return Proof(exercise.id, LIBRARY, "scores nothing", held, report.sentence or "passed")


def _judge(exercise: Exercise, seed: int, answer) -> Report:
    """As `evaluate`, but the answer may call the course's own: it is made from it."""
    cases = exercise.all_cases(seed)
    got = outcomes(answer, cases, exercise.run)
    return judge(exercise, seed, cases, expect(exercise, cases), got)
