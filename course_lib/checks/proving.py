"""Prove that a check can fail, and can pass: the stub, each misconception, each solution.

`course prove` prints the list; the tests assert it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from course_lib.checks.answering import Outcome, outcomes
from course_lib.checks.checking import evaluate
from course_lib.checks.exercise import Answer, Exercise
from course_lib.checks.judging import LIBRARY, Report, Wrong, expect, judge


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
    cases = exercise.all_cases(seed)
    expected, explained = expect(exercise, cases), Wrong(exercise, cases)

    def report(outcome: Callable[[int], Outcome], count: int = len(cases)) -> Report:
        """The verdict on the first `count` cases."""
        got = [outcome(case) for case in range(count)]
        return judge(exercise, seed, cases[:count], expected[:count], got, explained)

    def refused(name: str, sentence: str, outcome: Callable[[int], Outcome]) -> Proof:
        """A case that fails, with its sentence, is proof enough: more cases fail no less, and what
        looks like another mistake on all cases does so on the first ones."""
        tried = (report(outcome, count) for count in range(1, len(cases)))
        first = next((told for told in tried if not told.passed), None)
        if first and first.sentence == sentence:
            return _refused(exercise, name, sentence, first)
        return _refused(exercise, name, sentence, report(outcome))

    def put(answer: Answer) -> Report:
        """As `evaluate`, but the answer may call the course's own: it is made from it."""
        return report(outcomes(answer, cases, exercise.run).__getitem__)

    def unsolved(case: int) -> Outcome:
        return outcomes(stub, [cases[case]], exercise.run)[0]

    proofs = [refused("the unsolved stub", f"Not solved yet: {exercise.task}", unsolved)]
    for index, each in enumerate(exercise.misconceptions):
        proofs.append(refused(each.name, each.hint, partial(explained.outcome, index)))
    if exercise.library:
        proofs.append(_calls_the_library(exercise, seed))
    for number, answer in enumerate((exercise.reference, *exercise.alternatives), start=1):
        proofs.append(_accepted(exercise, number, put(answer)))
    return proofs


def _refused(exercise: Exercise, name: str, sentence: str, report: Report) -> Proof:
    held = not report.passed and report.sentence == sentence
    return Proof(exercise.id, name, f"fails: {sentence}", held, report.sentence or "passed")


def _accepted(exercise: Exercise, number: int, report: Report) -> Proof:
    name = f"correct solution {number}"
    return Proof(exercise.id, name, "passes", report.passed, report.sentence or "passed")


def _calls_the_library(exercise: Exercise, seed: int) -> Proof:
    report = evaluate(exercise, exercise.reference, seed)
    held = report.score == 0 and report.misconception == LIBRARY
    return Proof(exercise.id, LIBRARY, "scores nothing", held, report.sentence or "passed")
