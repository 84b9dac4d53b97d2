"""Lesson 02, 02-checkpoint: what is kept, what comes back, what is computed again."""

from course_lib import ledger
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line
from course_lib.ledger import work as library

PARTS = {"resident": 1, "peak": 2, "flops": 1}
KINDS = ("none", "selective", "full")


def checkpointed(kind, layers, block, core):
    dropped, again = {
        "none": (0, 0),
        "selective": (core["saved"], core["flops"]),
        "full": (block["saved"] - block["input"], block["flops"]),
    }[kind]
    resident = layers * (block["saved"] - dropped)
    flops = layers * (3 * block["flops"] + again)  # forward, and twice as much for backward
    return {"resident": resident, "peak": resident + dropped, "flops": flops}


def _by_kind(kind, layers, block, core):
    kept, forwards = block["saved"], layers * block["flops"]
    if kind == "full":
        kept, forwards = block["input"], 2 * forwards
    elif kind == "selective":
        kept, forwards = kept - core["saved"], forwards + layers * core["flops"]
    return {
        "resident": kept * layers,
        "peak": kept * (layers - 1) + block["saved"],
        "flops": forwards + 2 * layers * block["flops"],
    }


def _wrong(**change):
    """The reference with lines replaced: name=lambda kind, layers, block, core: …"""

    def answer(*args):
        return checkpointed(*args) | {name: f(*args) for name, f in change.items()}

    return answer


def _of(**kinds):
    """A line that is wrong for some kinds alone."""

    def line(name):
        def value(kind, layers, block, core):
            right = checkpointed(kind, layers, block, core)[name]
            return kinds[kind](layers, block, core) if kind in kinds else right

        return value

    return line


def _cases(kind: str, layers: int, block: tuple, core: tuple) -> list[Case]:
    given = dict(zip(("input", "saved", "flops"), block, strict=True))
    inner = dict(zip(("saved", "flops"), core, strict=True))
    return [Case(f"{kind}, {layers} blocks", (kind, layers, given, inner), part) for part in PARTS]


def _resident(kind, layers, block, core):
    return checkpointed(kind, layers, block, core)["resident"]


CHECKPOINT = Exercise(
    id="02-checkpoint",
    title="Kept, or computed again",
    task="Return what blocks keep for backward, their peak in it, and the FLOPs of a step.",
    points=PARTS,
    reference=checkpointed,
    alternatives=(_by_kind,),
    cases=tuple(
        case
        for layers, block, core in ((4, (2, 30, 100), (10, 7)), (96, (50, 1400, 9000), (960, 250)))
        for kind in KINDS
        for case in _cases(kind, layers, block, core)
    ),
    fresh=lambda rng: [
        case
        for kind in KINDS
        for case in _cases(
            kind,
            rng.randrange(10, 100),
            (rng.randrange(10, 50), rng.randrange(400, 900), rng.randrange(1000, 2000)),
            (rng.randrange(100, 300), rng.randrange(10, 200)),
        )
    ],
    run=call_for_a_line,
    library=(ledger.peak, library.work),
    nudge="For each kind: what does one block drop, and what does it cost to have it again? None: "
    "nothing. Selective: the core. Full: all but the input. At the peak one block has its dropped "
    "part back; FLOPs are three forwards, and what is computed again.",
    misconceptions=(
        Misconception(
            "full keeps nothing",
            _wrong(resident=_of(full=lambda n, block, core: 0)("resident")),
            "Under full checkpointing a block keeps its input: from what else should it compute "
            "again?",
        ),
        Misconception(
            "full keeps nothing, and the peak is one block",
            _wrong(
                resident=_of(full=lambda n, block, core: 0)("resident"),
                peak=_of(full=lambda n, block, core: block["saved"])("peak"),
            ),
            "Under full checkpointing a block keeps its input: from what else should it compute "
            "again?",
        ),
        Misconception(
            "full drops the input too late",
            _wrong(resident=_of(full=lambda n, block, core: n * block["saved"])("resident")),
            "Under full checkpointing a block keeps its input alone. The rest goes as soon as "
            "forward has left it.",
        ),
        Misconception(
            "selective keeps the core",
            _wrong(resident=_of(selective=lambda n, block, core: n * core["saved"])("resident")),
            "It is the other way round: selective checkpointing drops the core, large and cheap to "
            "compute again, and keeps the rest.",
        ),
        Misconception(
            "selective keeps all",
            _wrong(resident=_of(selective=lambda n, block, core: n * block["saved"])("resident")),
            "Selective checkpointing drops what the core saves, in each block.",
        ),
        Misconception(
            "selective keeps the input alone",
            _wrong(resident=_of(selective=lambda n, block, core: n * block["input"])("resident")),
            "To keep the input alone is full checkpointing. Selective keeps all but the core.",
        ),
        Misconception(
            "the peak is what is kept",
            _wrong(peak=_resident),
            "Before a block's backward, what it dropped is computed again and is there: one "
            "block's worth, on top of what all blocks keep.",
        ),
        Misconception(
            "all blocks at once",
            _wrong(peak=lambda kind, n, block, core: n * block["saved"]),
            "You have all blocks back at once. Backward computes one block again, uses it, lets it "
            "go, then the next.",
        ),
        Misconception(
            "the input twice",
            _wrong(
                peak=_of(full=lambda n, block, core: n * block["input"] + block["saved"])("peak")
            ),
            "You count the block's input twice: `saved` has it, and what is kept has it, too.",
        ),
        Misconception(
            "all of a block under selective",
            _wrong(
                peak=_of(
                    selective=lambda n, block, core: (
                        n * (block["saved"] - core["saved"]) + block["saved"]
                    )
                )("peak")
            ),
            "Selective checkpointing computes the core again: the core's bytes come back, not the "
            "whole block's.",
        ),
        Misconception(
            "a whole block more",
            _wrong(
                peak=lambda kind, n, block, core: (
                    _resident(kind, n, block, core) + (kind != "none") * block["saved"]
                )
            ),
            "Only what was dropped comes back. What is kept of that block is counted already.",
        ),
        Misconception(
            "a whole block more, always",
            _wrong(
                peak=lambda kind, n, block, core: _resident(kind, n, block, core) + block["saved"]
            ),
            "Only what was dropped comes back. What is kept of that block is counted already.",
        ),
        Misconception(
            "nothing computed again",
            _wrong(flops=lambda kind, n, block, core: 3 * n * block["flops"]),
            "What is dropped must be computed again: FLOPs of a forward, of the block or its core.",
        ),
        Misconception(
            "selective computes all again",
            _wrong(flops=_of(selective=lambda n, block, core: 4 * n * block["flops"])("flops")),
            "Selective checkpointing computes the core again, not the block: that is why it is "
            "cheap.",
        ),
        Misconception(
            "backward again",
            _wrong(flops=_of(full=lambda n, block, core: 6 * n * block["flops"])("flops")),
            "You do everything twice. Full checkpointing runs forward twice and backward once: "
            "four forwards' worth, not six.",
        ),
        Misconception(
            "backward again, of blocks and cores",
            _wrong(
                flops=_of(
                    full=lambda n, block, core: 6 * n * block["flops"],
                    selective=lambda n, block, core: 3 * n * (block["flops"] + core["flops"]),
                )("flops")
            ),
            "You count backward of what is computed again, too. Forward runs a second time, "
            "backward once: one forward's worth more.",
        ),
        Misconception(
            "backward as cheap as forward",
            _wrong(
                flops=lambda kind, n, block, core: (
                    checkpointed(kind, n, block, core)["flops"] - n * block["flops"]
                )
            ),
            "Backward costs twice what forward does: a matrix product for the gradient of the "
            "input, and one for that of the weight.",
        ),
        Misconception(
            "forward alone",
            _wrong(
                flops=lambda kind, n, block, core: (
                    checkpointed(kind, n, block, core)["flops"] - 2 * n * block["flops"]
                )
            ),
            "You left out backward, which costs twice what forward does.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(checkpointed(*args).values()),
            'Your function does not return a dict with the keys "resident", "peak" and "flops".',
        ),
    ),
)
