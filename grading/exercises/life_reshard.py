"""Lesson 08, 08-reshard: what reshard_after_forward does to collectives, and to bytes."""

from course_lib import comm
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"all_gathers": 1, "reduce_scatters": 1, "whole": 1}


def micro_batch(blocks, root, reshard):
    again = len(blocks) if reshard else 0
    return {
        "all_gathers": 1 + len(blocks) + again,
        "reduce_scatters": 1 + len(blocks),
        "whole": root if reshard else root + sum(blocks),
    }


def _unit_by_unit(blocks, root, reshard):
    """A different way to the same: live through it."""
    gathers, whole, reduced = 0, {}, []
    for unit, size in [("root", root), *enumerate(blocks)]:
        whole[unit] = size
        gathers += 1
        if reshard and unit != "root":
            del whole[unit]
    between = sum(whole.values())
    for unit in [*reversed(range(len(blocks))), "root"]:
        gathers += unit not in whole
        whole.pop(unit, None)
        reduced.append(unit)
    return {"all_gathers": gathers, "reduce_scatters": len(reduced), "whole": between}


def _with(**wrong):
    """The reference with one thing wrong: a line as a function of the arguments."""

    def answer(*args):
        return micro_batch(*args) | {line: f(*args) for line, f in wrong.items()}

    return answer


def _cases(blocks: list[int], root: int) -> list[Case]:
    return [
        Case(
            f"{len(blocks)} block{'s' * (len(blocks) > 1)}, reshard {on}", (blocks, root, on), part
        )
        for on in (True, False)
        for part in PARTS
    ]


RESHARD = Exercise(
    id="08-reshard",
    title="Free after forward, or not",
    task="Return the collectives of a micro-batch, and the bytes that are whole when forward ends.",
    points=PARTS,
    reference=micro_batch,
    library=(comm.step,),
    alternatives=(_unit_by_unit,),
    cases=(*_cases([40], 100), *_cases([40, 40, 60], 100)),
    fresh=lambda rng: _cases([rng.randrange(10, 10**6) for _ in range(8)], rng.randrange(10**7)),
    run=call_for_a_line,
    nudge="In forward each unit is gathered, the root too. In backward those are gathered again "
    "that were freed: the blocks, if they reshard; the root is never freed after forward.",
    misconceptions=(
        Misconception(
            "the root is gathered again",
            _with(all_gathers=lambda b, r, on: (1 + on) * (1 + len(b))),
            "You gather the root again in backward. It is not freed after forward, whatever is "
            "said: backward begins with it at once.",
        ),
        Misconception(
            "the root as any other",
            _with(
                all_gathers=lambda b, r, on: (1 + on) * (1 + len(b)),
                whole=lambda b, r, on: 0 if on else r + sum(b),
            ),
            "You free the root after forward as any other unit. It stays, whatever is said: "
            "backward begins with it at once.",
        ),
        Misconception(
            "root unit forgotten",
            _with(
                all_gathers=lambda b, r, on: (1 + on) * len(b),
                reduce_scatters=lambda b, r, on: len(b),
            ),
            "You count the blocks alone. Embedding and head are a unit, too: the root.",
        ),
        Misconception(
            "not gathered again",
            _with(all_gathers=lambda b, r, on: len(b) + 1),
            "Your all_gathers do not depend on reshard. A unit that was freed after forward is "
            "gathered again for backward.",
        ),
        Misconception(
            "turned round",
            _with(all_gathers=lambda b, r, on: 1 + len(b) + (0 if on else len(b))),
            "You have it the other way round: with reshard units are freed, so these need the "
            "second gather.",
        ),
        Misconception(
            "all freed",
            _with(whole=lambda b, r, on: 0 if on else r + sum(b)),
            "You let nothing stay with reshard. The root does: backward begins with it.",
        ),
        Misconception(
            "the last block stays",
            _with(whole=lambda b, r, on: r + (b[-1] if on else sum(b))),
            "You keep the last block whole, too. Backward needs it soon, and it could stay; FSDP2 "
            "frees every unit but the root, and sends for the last block while the head computes.",
        ),
        Misconception(
            "reductions depend on it",
            _with(reduce_scatters=lambda b, r, on: (1 + on) * (1 + len(b))),
            "Gradients are reduced once in a micro-batch for each unit, however often its "
            "parameters were gathered.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(micro_batch(*args).values()),
            'Your function does not return a dict with the keys "all_gathers", "reduce_scatters" '
            'and "whole".',
        ),
    ),
)
