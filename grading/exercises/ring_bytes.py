"""03-bytes: what a ring collective sends from each rank."""

from course_lib import specs
from course_lib.checks.exercise import Case, Exercise, Misconception

KINDS = ("reduce_scatter", "all_gather", "all_reduce")
ONE_PART = (
    "You took the buffer for one rank's part; it is the whole buffer, also for an all_gather."
)
POINTS = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}


def rounds(kind):
    return 2 if kind == "all_reduce" else 1


def bytes_per_rank(kind, elements, itemsize, ranks):
    chunk = -(-elements // ranks)  # rounded up: the last chunks are padded
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (ranks - 1) * chunk * itemsize


def _bytes_step_by_step(kind, elements, itemsize, ranks):
    total = 0
    for _ in range(rounds(kind)):
        for _ in range(ranks - 1):
            total += (elements + ranks - 1) // ranks * itemsize
    return total


def _bytes(change):
    """A wrong count, from the rounds, the chunk in elements, the itemsize, ranks and elements."""

    def answer(kind, elements, itemsize, ranks):
        return change(rounds(kind), -(-elements // ranks), itemsize, ranks, elements)

    return answer


def _bytes_cases(elements: int, itemsize: int, ranks: int) -> list[Case]:
    dtype = {2: "bf16", 4: "fp32"}[itemsize]
    name = f"{elements:,} {dtype} elements, {ranks} rank{'s' if ranks > 1 else ''}"
    return [Case(name, (kind, elements, itemsize, ranks), kind) for kind in KINDS]


BYTES = Exercise(
    id="03-bytes",
    title="Bytes per rank",
    task="Return the bytes that a ring collective sends from each rank.",
    points=POINTS,
    reference=bytes_per_rank,
    alternatives=(_bytes_step_by_step,),
    cases=(*_bytes_cases(10, 4, 4), *_bytes_cases(5, 2, 1), *_bytes_cases(25_000_001, 2, 8)),
    fresh=lambda rng: [
        case
        for _ in range(2)
        for case in _bytes_cases(rng.randrange(1, 10**6) * 6 + 1, rng.choice((2, 4)), 6)
    ],
    library=(specs.Collective.bytes_per_rank, specs.Collective.steps),
    nudge="Steps times bytes of a chunk: N - 1 steps for one half, 2(N - 1) for an all-reduce.",
    misconceptions=(
        Misconception(
            "all-reduce counted once",
            _bytes(lambda rounds, chunk, size, n, e: (n - 1) * chunk * size),
            "You count an all_reduce as one round. It is two: a reduce_scatter, after which each "
            "rank has one summed chunk, and an all_gather, which hands the chunks round.",
        ),
        Misconception(
            "all of them counted twice",
            _bytes(lambda rounds, chunk, size, n, e: 2 * (n - 1) * chunk * size),
            "You count two rounds for every kind. A reduce_scatter or an all_gather alone is one, "
            "half of an all_reduce.",
        ),
        Misconception(
            "the whole buffer",
            _bytes(lambda rounds, chunk, size, n, e: rounds * e * size),
            "You count the whole buffer in each round. A rank never sends one chunk of the N: the "
            "factor is (N-1)/N.",
            "At 2 ranks that halves the bytes, at 64 it hardly matters.",
        ),
        Misconception(
            "N steps",
            _bytes(lambda rounds, chunk, size, n, e: rounds * n * chunk * size),
            "You count N steps in each round. After N - 1 of them a chunk has been everywhere.",
        ),
        Misconception(
            "padding dropped",
            _bytes(lambda rounds, chunk, size, n, e: rounds * (n - 1) * (e // n) * size),
            "You rounded the chunk down: N such chunks do not hold the buffer. It is padded, so a "
            "chunk has elements / N, rounded up.",
            "-(-a // b) rounds up without floats.",
        ),
        Misconception(
            "padding ignored",
            _bytes(lambda rounds, chunk, size, n, e: rounds * (n - 1) * e * size / n),
            "Your chunk is not a whole number of elements. Round elements / ranks up first, then "
            "multiply.",
            "-(-a // b) rounds up without floats.",
        ),
        Misconception(
            "padding ignored, rounded at the end",
            _bytes(lambda rounds, chunk, size, n, e: rounds * (n - 1) * e * size // n),
            "You rounded at the end. It is the chunk that is a whole number of elements: round "
            "elements / ranks up first, then multiply.",
            "-(-a // b) rounds up without floats.",
        ),
        Misconception(
            "bytes rounded up",
            _bytes(lambda rounds, chunk, size, n, e: rounds * (n - 1) * -(-e * size // n)),
            "You rounded bytes up. A chunk is a whole number of elements.",
            "Round elements / ranks up first: -(-a // b) does it without floats.",
        ),
        Misconception(
            "rounded up at the end",
            _bytes(lambda rounds, chunk, size, n, e: -(-rounds * (n - 1) * e * size // n)),
            "You rounded the total up, in bytes. It is the chunk that is rounded up, to a whole "
            "number of elements.",
            "-(-a // b) rounds up without floats.",
        ),
        Misconception(
            "an all_gather's elements taken for one rank's part",
            lambda kind, elements, size, n: bytes_per_rank(
                kind, elements * (n if kind == "all_gather" else 1), size, n
            ),
            ONE_PART,
        ),
        Misconception(
            "elements",
            _bytes(lambda rounds, chunk, size, n, e: rounds * (n - 1) * chunk),
            "You counted elements. Each has `itemsize` bytes.",
        ),
        Misconception(
            "one step",
            _bytes(lambda rounds, chunk, size, n, e: rounds * chunk * size),
            "You counted one step of each round. Each rank sends a chunk in every one of N - 1 "
            "steps.",
        ),
        Misconception(
            "whole buffers in every step",
            _bytes(lambda rounds, chunk, size, n, e: rounds * (n - 1) * e * size),
            "You send the whole buffer in every step. A step moves one chunk, an N-th of it.",
        ),
        Misconception(
            "all ranks together",
            _bytes(lambda rounds, chunk, size, n, e: rounds * n * (n - 1) * chunk * size),
            "You added up all ranks. The ledger is per rank, as each has links of its own.",
        ),
        Misconception(
            "sent and received added",
            _bytes(lambda rounds, chunk, size, n, e: 2 * rounds * (n - 1) * chunk * size),
            "You are high by a factor of two: a link carries both directions at once, so what is "
            "received is not added to what is sent.",
        ),
    ),
)
