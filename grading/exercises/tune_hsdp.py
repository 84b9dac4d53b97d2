"""Lesson 09, 09-hsdp: bytes within a node and between nodes, and a norm that counts none twice."""

from math import sqrt

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"within": 1, "between": 1, "norm": 1}


def hsdp(elements, replicas, shards, itemsize, squares):
    shard = elements // shards * itemsize
    return {
        "within": 3 * (shards - 1) * shard,
        "between": 2 * (replicas - 1) * shard // replicas,
        "norm": sqrt(sum(squares[:shards])),
    }


def _by_collective(elements, replicas, shards, itemsize, squares):
    def ring(count, ranks):
        return count * itemsize * (ranks - 1) // ranks

    gathers, scatter = 2 * ring(elements, shards), ring(elements, shards)
    return {
        "within": gathers + scatter,
        "between": ring(elements // shards, replicas) + ring(elements // shards, replicas),
        "norm": (sum(squares) / replicas) ** 0.5,  # all replicas have the same
    }


def _hsdp(
    within=lambda e, r, s: 3 * (s - 1) * e // s,
    between=lambda e, r, s: 2 * (r - 1) * (e // s) // r,
    norm=lambda squares, r, s: sqrt(sum(squares[:s])),
    itemsize=lambda itemsize: itemsize,
):
    """The reference with one thing wrong; r replicas and s shards."""

    def answer(elements, replicas, shards, size, squares):
        mesh = (replicas, shards)
        return {
            "within": within(elements, *mesh) * itemsize(size),
            "between": between(elements, *mesh) * itemsize(size),
            "norm": norm(squares, *mesh),
        }

    return answer


def _cases(elements: int, replicas: int, shards: int, itemsize: int, row: list) -> list[Case]:
    name = f"{elements:,} elements on {replicas} nodes of {shards}"
    args = (elements, replicas, shards, itemsize, row * replicas)
    return [Case(name, args, part) for part in PARTS]


HSDP = Exercise(
    id="09-hsdp",
    title="Two levels",
    task="Return the bytes that a rank sends within its node and between nodes, and the norm.",
    points=PARTS,
    reference=hsdp,
    alternatives=(_by_collective,),
    compare=close(1e-9),
    cases=(
        *_cases(160, 2, 4, 2, [9.0, 0.0, 4.0, 3.0]),
        *_cases(160, 4, 2, 4, [9.0, 16.0]),
        *_cases(160, 1, 4, 2, [9.0, 2.0, 4.0, 1.0]),
    ),
    fresh=lambda rng: _cases(
        512 * rng.randrange(10**5, 10**6),
        rng.choice((4, 8, 16)),
        8,
        2,
        [float(rng.randrange(1, 50)) for _ in range(8)],
    ),
    run=call_for_a_line,
    nudge="Within the node it is FSDP on `shards` ranks: two all_gathers and a reduce_scatter. "
    "Between nodes an all_reduce of a shard, twice (R - 1)/R of it. The squares of one replica are "
    "those of the whole gradient.",
    misconceptions=(
        Misconception(
            "sharded over all ranks",
            _hsdp(within=lambda e, r, s: 3 * (r * s - 1) * e // (r * s)),
            "You shard over all ranks. Under HSDP a node has all of the model, and gathers from "
            "its own ranks alone.",
        ),
        Misconception(
            "two collectives within",
            _hsdp(within=lambda e, r, s: 2 * (s - 1) * e // s),
            "You count two collectives within the node. There are three: an all_gather for "
            "forward, one for backward, and a reduce_scatter.",
        ),
        Misconception(
            "all of the buffer",
            _hsdp(within=lambda e, r, s: 3 * e),
            "A ring sends S - 1 of S pieces: a rank's own does not travel.",
        ),
        Misconception(
            "the whole gradient between nodes",
            _hsdp(between=lambda e, r, s: 2 * (r - 1) * e // r),
            "You send whole gradients between nodes: that is DDP. The reduce_scatter within the "
            "node comes first, so that a rank has a shard to average with its replicas.",
        ),
        Misconception(
            "half an all_reduce",
            _hsdp(between=lambda e, r, s: (r - 1) * (e // s) // r),
            "An all_reduce is a reduce_scatter and an all_gather: twice (R - 1)/R.",
        ),
        Misconception(
            "parameters between nodes",
            _hsdp(between=lambda e, r, s: 3 * (r - 1) * (e // s) // r),
            "You send three times a shard between nodes. Parameters never leave the node: it has "
            "all of them. What crosses is an all_reduce of gradients.",
        ),
        Misconception(
            "an all_reduce among all ranks",
            _hsdp(between=lambda e, r, s: 2 * (r * s - 1) * (e // s) // (r * s)),
            "You reduce a shard among all ranks. It has as many copies as there are nodes: these "
            "ranks take part, one on each.",
        ),
        Misconception(
            "the norm over all ranks",
            _hsdp(norm=lambda squares, r, s: sqrt(sum(squares))),
            "You add up all ranks' squares. Replicas have the same shards: every element is "
            "counted as often as there are nodes, and the norm is too large by the square root.",
        ),
        Misconception(
            "the norm over replicas",
            _hsdp(norm=lambda squares, r, s: sqrt(sum(squares[::s]))),
            "You add up the squares of ranks with the same shard. Those with different shards make "
            "up the gradient: the ranks of one node.",
        ),
        Misconception(
            "a mean",
            _hsdp(norm=lambda squares, r, s: sqrt(sum(squares) / (r * s))),
            "You take the mean over ranks. The shards of a node are parts of one gradient: their "
            "squares add up.",
        ),
        Misconception(
            "norms added",
            _hsdp(norm=lambda squares, r, s: sum(sqrt(x) for x in squares[:s])),
            "You add up norms. Squares add up; the root comes last.",
        ),
        Misconception(
            "no root",
            _hsdp(norm=lambda squares, r, s: sum(squares[:s])),
            "That is the square of the norm.",
        ),
        Misconception(
            "elements",
            _hsdp(itemsize=lambda size: 1),
            "You count elements. Each has itemsize bytes.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(hsdp(*args).values()),
            'Your function does not return a dict with the keys "within", "between" and "norm".',
        ),
    ),
)
