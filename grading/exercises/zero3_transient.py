"""Lesson 07, 07-transient: what a rank holds, at rest and at the worst moment."""

from itertools import accumulate, pairwise

from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"rest": 1, "whole": 2}


def held(units, ranks, ahead):
    rest = 16 * sum(units) // ranks
    together = [sum(units[i : i + 1 + ahead]) for i in range(len(units))]
    return {"rest": rest, "whole": 2 * max(together)}


def _by_sums(units, ranks, ahead):
    upto = [0, *accumulate(units), *[sum(units)] * ahead]
    each = [sum(b - a for a, b in pairwise(upto[i : i + 2 + ahead])) for i in range(len(units))]
    shard = sum(unit // ranks for unit in units)
    return {"rest": (2 + 2 + 4 + 4 + 4) * shard, "whole": 2 * max(each)}


def _held(
    rest=lambda p, n: 16 * p // n,
    whole=lambda units, ahead, n: max(2 * sum(units[i : i + 1 + ahead]) for i in range(len(units))),
):
    def answer(units, ranks, ahead):
        return {"rest": rest(sum(units), ranks), "whole": whole(units, ahead, ranks)}

    return answer


def _right(units, ahead, n=1):
    return held(units, 1, ahead)["whole"]


def _cases(units: list[int], ranks: int, ahead: int) -> list[Case]:
    name = f"{len(units)} units on {ranks} ranks, {ahead} ahead"
    return [Case(name, (units, ranks, ahead), part) for part in PARTS]


TRANSIENT = Exercise(
    id="07-transient",
    title="The worst moment",
    task="Return what a rank of ZeRO-3 holds at rest, and the most that is whole at a time.",
    points=PARTS,
    reference=held,
    alternatives=(_by_sums,),
    cases=(*_cases([80, 8, 120, 40, 100], 4, 0), *_cases([80, 8, 120, 40, 100], 4, 1)),
    fresh=lambda rng: _cases(
        [64 * rng.randrange(10**5, 10**6) for _ in range(8)], rng.choice((8, 16, 64)), 2
    ),
    run=call_for_a_line,
    nudge="At rest everything is cut in N: 2 + 2 + 12 bytes for each parameter. Whole at a time: a "
    "unit and the `ahead` that follow it, 2 bytes each; take the largest such sum.",
    misconceptions=(
        Misconception(
            "nothing sharded",
            _held(rest=lambda p, n: 16 * p),
            "16P is DDP. A rank of ZeRO-3 keeps 1/N of everything.",
        ),
        Misconception(
            "ZeRO-2",
            _held(rest=lambda p, n: 2 * p + 14 * p // n),
            "2P + 14P/N is ZeRO-2, which keeps parameters whole on every rank. Here they are "
            "sharded, too.",
        ),
        Misconception(
            "parameters alone sharded",
            _held(rest=lambda p, n: 2 * p // n + 14 * p),
            "You shard parameters alone. ZeRO-3 is the third rung: gradients and optimizer states "
            "are sharded already.",
        ),
        Misconception(
            "no masters",
            _held(rest=lambda p, n: 12 * p // n),
            "You forgot the fp32 masters: 4 of the optimizer's 12 bytes. They are sharded as well.",
        ),
        Misconception(
            "the whole model",
            _held(whole=lambda units, ahead, n: 2 * sum(units)),
            "You count the whole model. Units are gathered one after another, and freed after "
            "use: never are all whole at once.",
        ),
        Misconception(
            "the largest unit alone",
            _held(whole=lambda units, ahead, n: 2 * max(units)),
            "You count the largest unit. While it computes, the `ahead` next ones are gathered.",
        ),
        Misconception(
            "the largest units together",
            _held(whole=lambda units, ahead, n: 2 * sum(sorted(units)[-1 - ahead :])),
            "You add up the largest units, wherever they are. Those that are whole at the same "
            "time follow one another.",
        ),
        Misconception(
            "the largest, so many times",
            _held(whole=lambda units, ahead, n: 2 * (1 + ahead) * max(units)),
            "You take every unit for as large as the largest. Add up those that follow one "
            "another, and take the largest sum.",
        ),
        Misconception(
            "one too many",
            _held(whole=lambda units, ahead, n: _right(units, ahead + 1)),
            "You have one unit too many: one computes, and `ahead` are gathered ahead of it.",
        ),
        Misconception(
            "one too few",
            _held(whole=lambda units, ahead, n: _right(units, max(ahead - 1, 0))),
            "You have one unit too few: `ahead` are gathered ahead of the one that computes.",
        ),
        Misconception(
            "16 bytes",
            _held(whole=lambda units, ahead, n: 8 * _right(units, ahead)),
            "You count 16 bytes for each parameter of a whole unit. Its parameters alone are "
            "gathered, 2 bytes each.",
        ),
        Misconception(
            "fp32",
            _held(whole=lambda units, ahead, n: 2 * _right(units, ahead)),
            "You gather 4 bytes for each parameter. In mixed precision the 16-bit copy travels; "
            "the masters stay where they are.",
        ),
        Misconception(
            "elements",
            _held(whole=lambda units, ahead, n: _right(units, ahead) // 2),
            "You count parameters. Each has 2 bytes.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(held(*args).values()),
            'Your function does not return a dict with the keys "rest" and "whole".',
        ),
    ),
)
