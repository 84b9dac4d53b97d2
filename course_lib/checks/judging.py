"""Judge an answer's outcomes: which parts hold, and which idea went wrong where one does not.

The judge sees plain data only. It runs the reference and, where something differs, the
misconceptions on the same cases; the misconception whose outcomes are the learner's gives the
sentence.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from course_lib.checks.answering import Outcome, outcomes
from course_lib.checks.comparison import show
from course_lib.checks.exercise import Case, Exercise, Misconception

LIBRARY = "calls the library"


@dataclass(frozen=True)
class Part:
    """One part of an exercise: what it is worth, and how many of its cases hold."""

    name: str
    points: int
    held: int
    cases: int

    @property
    def passed(self) -> bool:
        return self.held == self.cases


@dataclass(frozen=True)
class Report:
    """The verdict on one answer. `sentence` is about the idea; `failing` is the smallest case."""

    exercise: str
    title: str
    points: int
    score: int
    parts: tuple[Part, ...]
    sentence: str = ""
    further: str = ""
    misconception: str = ""
    failing: str = ""
    difference: str = ""
    printed: str = ""
    seed: int = 0

    @property
    def passed(self) -> bool:
        return self.score == self.points

    def to_dict(self) -> dict:
        """Plain data, for a notebook's output, a progress file or a gradebook."""
        return asdict(self) | {"passed": self.passed}


def expect(exercise: Exercise, cases: Sequence[Case]) -> list[Outcome]:
    """What the reference does; worked out before a learner's code runs in the same process."""
    expected = outcomes(exercise.reference, cases, exercise.run)
    if broken := next((outcome.raised for outcome in expected if outcome.raised), None):
        raise RuntimeError(f"the reference of {exercise.id} raised {broken}")
    return expected


class Wrong:
    """What each misconception does on each case: worked out when it is asked for, and once."""

    def __init__(self, exercise: Exercise, cases: Sequence[Case]) -> None:
        self._exercise, self._cases = exercise, cases
        self._known: dict[tuple[int, int], Outcome] = {}

    def knows(self, misconception: int, case: int) -> bool:
        return (misconception, case) in self._known

    def outcome(self, misconception: int, case: int) -> Outcome:
        """Both are named by their index."""
        key = misconception, case
        if key not in self._known:
            answer = self._exercise.misconceptions[misconception].answer
            (self._known[key],) = outcomes(answer, [self._cases[case]], self._exercise.run)
        return self._known[key]


def judge(
    exercise: Exercise,
    seed: int,
    cases: Sequence[Case],
    expected: Sequence[Outcome],
    got: Sequence[Outcome],
    wrong: Wrong | None = None,
) -> Report:
    """Compare what an answer did on `cases` with what it should have done.

    Several answers to the same cases may share one `wrong`.
    """
    differences = [_difference(exercise, e, g) for e, g in zip(expected, got, strict=True)]
    held = [difference is None for difference in differences]
    library = next((outcome.off_limits for outcome in got if outcome.off_limits), "")
    parts = tuple(
        Part(name, points, *_count(name, cases, held)) for name, points in exercise.points.items()
    )
    score = 0 if library else sum(part.points for part in parts if part.passed)
    about = dict(exercise=exercise.id, title=exercise.title, points=exercise.total, seed=seed)
    if library:
        return Report(**about, score=0, parts=parts, **_library_words(library))
    if all(held):
        return Report(**about, score=score, parts=parts)
    first = held.index(False)
    return Report(
        **about,
        score=score,
        parts=parts,
        **_words(exercise, wrong or Wrong(exercise, cases), got, first),
        failing=_call_words(cases[first]),
        difference=differences[first],
        printed=got[first].printed,
    )


def _difference(exercise: Exercise, expected: Outcome, got: Outcome) -> str | None:
    if got.raised:
        if got.raised.type == "NotImplementedError":
            return "the gap is still open"
        at = f" ({got.raised.line})" if got.raised.line else ""
        return f"it raised {got.raised.type}: {got.raised.message}{at}"
    return exercise.compare(expected.value, got.value)


def _count(part: str, cases: Sequence[Case], held: Sequence[bool]) -> tuple[int, int]:
    mine = [ok for case, ok in zip(cases, held, strict=True) if case.part == part]
    return sum(mine), len(mine)


def _words(exercise, wrong, got, first) -> dict[str, str]:
    """The sentence about the idea, and the hint behind it."""
    raised = got[first].raised
    if raised and raised.type == "NotImplementedError":
        return {"sentence": f"Not solved yet: {exercise.task}", "further": exercise.nudge}
    if found := _explain(exercise, wrong, got, first):
        return {
            "sentence": found.hint,
            "further": found.further or exercise.nudge,
            "misconception": found.name,
        }
    if raised:
        return {"sentence": f"Your function raised {raised.type}.", "further": exercise.nudge}
    return {
        "sentence": "The answer differs from the reference on the case below.",
        "further": exercise.nudge,
    }


def _explain(exercise, wrong, got, first) -> Misconception | None:
    """The misconception that does what the learner's answer does, on every case."""
    telling_first = [first, *range(len(got))]
    for index, misconception in enumerate(exercise.misconceptions):
        known = [case for case in telling_first if wrong.knows(index, case)]
        if all(
            _same(exercise, wrong.outcome(index, case), got[case])
            for case in (*known, *telling_first)
        ):
            return misconception
    return None


def _same(exercise: Exercise, wrong: Outcome, got: Outcome) -> bool:
    if wrong.raised or got.raised:
        return (wrong.raised and wrong.raised.type) == (got.raised and got.raised.type)
    return exercise.compare(wrong.value, got.value) is None


def _library_words(name: str) -> dict[str, str]:
    function = name.split(":")[-1]
    return {
        "sentence": f"Your answer calls the course's own `{function}`, which is what is asked of "
        "you here: write it yourself.",
        "further": "Use the library to compare with afterwards; this check scores your own code.",
        "misconception": LIBRARY,
    }


def _call_words(case: Case) -> str:
    arguments = ", ".join(show(argument) for argument in case.args)
    return f"{case.name}: {case.given or f'called with ({arguments})'}"
