"""Lesson 09, 09-checkpoint: gathers and forwards by the order of checkpoint and unit."""

from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"all_gathers": 2, "forwards": 1}


def count(order, recompute_frees, blocks, micro_batches):
    third = order == "outside" and recompute_frees
    gathers = 1 + blocks * (3 if third else 2)
    forwards = blocks * (1 if order == "none" else 2)
    return {"all_gathers": micro_batches * gathers, "forwards": micro_batches * forwards}


def _by_walking(order, recompute_frees, blocks, micro_batches):
    """A block's life, event by event; the root's one gather comes on top."""
    frees_after = {"forward": True, "recompute": recompute_frees and order == "outside"}
    life = ["forward", "backward"] if order == "none" else ["forward", "recompute", "backward"]
    gathers, whole = 0, False
    for event in life:
        gathers += not whole
        whole = not frees_after.get(event, True)
    forwards = sum(event != "backward" for event in life)
    return {
        "all_gathers": (gathers * blocks + 1) * micro_batches,
        "forwards": forwards * blocks * micro_batches,
    }


def _count(
    gathers=lambda order, frees: 3 if order == "outside" and frees else 2,
    forwards=lambda order: 1 if order == "none" else 2,
    root=1,
    rounds=lambda micro_batches: micro_batches,
):
    """The reference with one thing wrong."""

    def answer(order, recompute_frees, blocks, micro_batches):
        each, rest = gathers(order, recompute_frees), root
        return {
            "all_gathers": rounds(micro_batches) * (rest + blocks * each),
            "forwards": rounds(micro_batches) * blocks * forwards(order),
        }

    return answer


def _cases(order: str, recompute_frees: bool, blocks: int, micro_batches: int) -> list[Case]:
    frees = "frees" if recompute_frees else "frees nothing"
    each = f"{micro_batches} micro-batch" + "es" * (micro_batches > 1)
    name = f"{order}, recomputing {frees}, {blocks} blocks, {each}"
    return [Case(name, (order, recompute_frees, blocks, micro_batches), part) for part in PARTS]


CHECKPOINT = Exercise(
    id="09-checkpoint",
    title="Two gathers or three",
    task="Return how many all_gathers a step has, and how many forwards of blocks.",
    points=PARTS,
    reference=count,
    alternatives=(_by_walking,),
    cases=(
        *_cases("none", True, 2, 1),
        *_cases("outside", True, 4, 1),
        *_cases("outside", False, 4, 1),
        *_cases("inside", True, 4, 1),
        *_cases("outside", True, 4, 3),
    ),
    fresh=lambda rng: [
        case
        for order in ("inside", "outside")
        for case in _cases(order, True, rng.randrange(8, 80), rng.randrange(2, 9))
    ],
    run=call_for_a_line,
    nudge="Walk through one block: forward, then (with a checkpoint) forward again, then backward. "
    "At each of these: is it whole already? And what frees it? A checkpoint inside of the unit is "
    "recomputed behind the unit's hooks, which see one forward and one backward.",
    misconceptions=(
        Misconception(
            "outside is always three",
            _count(gathers=lambda order, frees: 3 if order == "outside" else 2),
            "Outside costs a third gather only if recomputing frees the unit. Where it stays whole "
            "until backward has passed, two are enough.",
        ),
        Misconception(
            "the wrong way round",
            _count(gathers=lambda order, frees: 3 if order == "inside" and frees else 2),
            "You have it the wrong way round. Inside of the unit, the checkpoint recomputes behind "
            "the unit's hooks; outside, it calls the unit, hooks and all.",
        ),
        Misconception(
            "any checkpoint is three",
            _count(gathers=lambda order, frees: 3 if order != "none" and frees else 2),
            "Not every checkpoint costs a gather. Inside of the unit it runs between the unit's "
            "gather and its free, which happen once in backward.",
        ),
        Misconception(
            "always two",
            _count(gathers=lambda order, frees: 2),
            "You count two always. Where recomputing runs the unit's own hooks, and these free it, "
            "backward has to gather it once more.",
        ),
        Misconception(
            "one without a checkpoint",
            _count(
                gathers=lambda order, frees: (
                    1 if order == "none" else 3 if order == "outside" and frees else 2
                )
            ),
            "Without a checkpoint, too, a unit is freed after forward, and gathered again for "
            "backward: autograd has kept its activations, not its parameters.",
        ),
        Misconception(
            "the root forgotten",
            _count(root=0),
            "You forgot the root unit: what is beside the blocks is gathered once in each "
            "micro-batch.",
        ),
        Misconception(
            "the root twice",
            _count(root=2),
            "You gather the root twice. It is not freed after forward, as backward begins there.",
        ),
        Misconception(
            "once a step",
            _count(rounds=lambda micro_batches: 1),
            "You count one micro-batch. Each gathers and computes anew.",
        ),
        Misconception(
            "one forward",
            _count(forwards=lambda order: 1),
            "A checkpointed block runs forward twice: in forward, and again in backward, to have "
            "its activations.",
        ),
        Misconception(
            "three forwards",
            _count(forwards=lambda order: {"none": 1, "inside": 2, "outside": 3}[order]),
            "Outside costs another gather, not another forward: a block is recomputed once.",
        ),
        Misconception(
            "forward again without a checkpoint",
            _count(forwards=lambda order: 2),
            "Without a checkpoint nothing is recomputed: activations are kept.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(count(*args).values()),
            'Your function does not return a dict with the keys "all_gathers" and "forwards".',
        ),
    ),
)
