"""Lesson 04, DDP and its redundancy: 04-redundancy, what is there more than once.

The exercises in which ranks communicate are in `ddp_…`.
"""

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line
from grading.exercises.ddp_accumulate import ACCUMULATE
from grading.exercises.ddp_average import AVERAGE
from grading.exercises.ddp_buckets import BUCKETS
from grading.exercises.ddp_hooks import HOOKS


def redundancy(parameters, ranks):
    copy = 16 * parameters
    held = ranks * copy
    redundant = held - copy
    return {"held": held, "redundant": redundant, "fraction": redundant / held}


def _redundancy_by_fraction(parameters, ranks):
    fraction = 1 - 1 / ranks
    held = 16 * parameters * ranks
    return {"held": held, "redundant": round(held * fraction), "fraction": fraction}


def _redundancy(change):
    def answer(parameters, ranks):
        return redundancy(parameters, ranks) | change(16 * parameters, ranks)

    return answer


_OF_ONE_RANK = "That is one rank's: held means on all ranks together."


def _redundancy_cases(parameters: int, ranks: int) -> list[Case]:
    name = f"{parameters:,} parameters on {ranks} rank{'s' if ranks > 1 else ''}"
    return [Case(name, (parameters, ranks), part) for part in ("held", "redundant", "fraction")]


REDUNDANCY = Exercise(
    id="04-redundancy",
    title="Count what is held more than once",
    task="Return the bytes held by all ranks, the redundant ones, and their fraction.",
    points={"held": 1, "redundant": 1, "fraction": 1},
    reference=redundancy,
    alternatives=(_redundancy_by_fraction,),
    cases=(*_redundancy_cases(10, 4), *_redundancy_cases(1_000_000, 1)),
    fresh=lambda rng: _redundancy_cases(rng.randrange(10**6, 10**9), rng.randrange(3, 200)),
    run=call_for_a_line,
    compare=close(1e-9),
    nudge="One copy must be held somewhere. Whatever is held beyond it is redundant.",
    misconceptions=(
        Misconception(
            "one copy",
            _redundancy(lambda copy, n: {"held": copy, "redundant": 0, "fraction": 0.0}),
            "You count one copy. Under data parallelism each rank holds one of its own: count what "
            "all ranks hold together.",
        ),
        Misconception(
            "held by one rank",
            _redundancy(lambda copy, n: {"held": copy}),
            _OF_ONE_RANK,
        ),
        Misconception(
            "held by one rank, and the fraction of that",
            _redundancy(lambda copy, n: {"held": copy, "fraction": n - 1.0}),
            _OF_ONE_RANK,
        ),
        Misconception(
            "no dict",
            lambda p, n: tuple(redundancy(p, n).values()),
            'Your function does not return a dict with the keys "held", "redundant" and '
            '"fraction".',
        ),
        Misconception(
            "everything is redundant",
            _redundancy(lambda copy, n: {"redundant": n * copy, "fraction": 1.0}),
            "You call every copy redundant. One of them is needed: the model has to be somewhere.",
        ),
        Misconception(
            "the needed fraction",
            _redundancy(lambda copy, n: {"fraction": 1 / n}),
            "1/N is the fraction that is needed. The redundant one is what remains of 1.",
        ),
        Misconception(
            "relative to one copy",
            _redundancy(lambda copy, n: {"fraction": n - 1.0}),
            "You divided by one copy: that says how many copies too many there are. A fraction is "
            "a part of all that is held.",
        ),
        Misconception(
            "weights only",
            lambda p, n: redundancy(p / 8, n),
            "You count 2 bytes per parameter, the weights. Gradients and optimizer states are held "
            "on every rank too: 16 bytes.",
        ),
        Misconception(
            "percent",
            _redundancy(lambda copy, n: {"fraction": 100 - 100 / n}),
            "You give percent. A fraction lies between 0 and 1.",
        ),
        Misconception(
            "per rank",
            _redundancy(lambda copy, n: {"redundant": copy - copy / n}),
            "You give the redundant bytes of one rank; asked is the sum over all ranks.",
        ),
    ),
)

EXERCISES = (REDUNDANCY, AVERAGE, BUCKETS, HOOKS, ACCUMULATE)
