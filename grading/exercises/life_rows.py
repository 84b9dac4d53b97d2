"""Lesson 08, 08-rows: which rows of a parameter are a rank's."""

from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded.fsdp_parameter import ShardedParameter
from grading.exercises import life_running


def rows(dim, ranks, rank):
    each = -(-dim // ranks)
    return min(rank * each, dim), min((rank + 1) * each, dim)


def _by_listing(dim, ranks, rank):
    """A different way to the same: deal the rows out, and look where they went."""
    each = (dim + ranks - 1) // ranks
    left, first = dim, 0
    for _ in range(rank):
        taken = min(each, left)
        first, left = first + taken, left - taken
    return [first, first + min(each, left)]


def _rounded_down(dim, ranks, rank):
    each = dim // ranks
    return rank * each, dim if rank == ranks - 1 else (rank + 1) * each


def _lost(dim, ranks, rank):
    each = dim // ranks
    return rank * each, (rank + 1) * each


def _even(dim, ranks, rank):
    each, more = divmod(dim, ranks)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def _padded(dim, ranks, rank):
    each = -(-dim // ranks)
    return rank * each, (rank + 1) * each


def _stop_alone(dim, ranks, rank):
    each = -(-dim // ranks)
    return rank * each, min((rank + 1) * each, dim)


def _last_included(dim, ranks, rank):
    first, stop = rows(dim, ranks, rank)
    return first, stop - 1


def _count(dim, ranks, rank):
    first, stop = rows(dim, ranks, rank)
    return first, stop - first


def _dealt(dim, ranks, rank):
    return rank, dim


def _cases(dim: int, ranks: int, *of_ranks: int) -> list[Case]:
    return [Case(f"{dim} rows on {ranks}, rank {r}", (dim, ranks, r)) for r in of_ranks]


ROWS = Exercise(
    id="08-rows",
    title="The rows of a rank",
    task="Return the first row that is the rank's, and the first that is not any more.",
    points={"all": 2},
    reference=rows,
    library=(ShardedParameter.__init__,),
    alternatives=(_by_listing,),
    cases=(
        *_cases(4, 2, 0, 1),
        *_cases(5, 2, 0, 1),
        *_cases(18, 8, 0, 5, 6, 7),
        *_cases(3, 4, 2, 3),
        *_cases(9, 8, 4, 6),
    ),
    fresh=lambda rng: _cases(rng.randrange(50, 1000), rng.randrange(20, 65), *range(0, 20, 3)),
    run=life_running.pair,
    nudge="each = ⌈dim / ranks⌉, which is -(-dim // ranks). Rank r begins at r · each and ends "
    "at (r + 1) · each, but neither is ever beyond dim.",
    misconceptions=(
        Misconception(
            "rounded down, the rest is the last one's",
            _rounded_down,
            "You round down, and the last rank gets all that is left over: then its shard is the "
            "longest. Round up: what is missing is missing at the end.",
        ),
        Misconception(
            "rows lost",
            _lost,
            "You round down, and the last rows belong to nobody. Round up.",
        ),
        Misconception(
            "as even as can be",
            _even,
            "You deal the rest out one by one, so that shards differ by one row at most. FSDP2 "
            "cuts as torch.chunk does: ⌈dim / ranks⌉ rows for each rank, as long as there are any.",
            "Six ranks have 3 of 18 rows, and two have none: not 3, 3, 2, 2, 2, 2, 2, 2.",
        ),
        Misconception(
            "padding counted as rows",
            _padded,
            "You count padding as rows: they go on beyond the parameter. A shard that an optimizer "
            "sees has real rows alone; padding is there only while it travels.",
            "Neither bound is beyond dim: min(…, dim).",
        ),
        Misconception(
            "an empty shard that begins too far",
            _stop_alone,
            "A rank without rows begins behind its own end: bound the first row by dim, too, so "
            "that stop - first is 0.",
        ),
        Misconception(
            "the last row itself",
            _last_included,
            "You return the last row itself. As in a slice, the second number is the first row "
            "that is not the rank's any more; else an empty shard could not be said.",
        ),
        Misconception(
            "how many",
            _count,
            "Your second number is how many rows there are. Asked is where they stop.",
        ),
        Misconception(
            "every so many rows",
            _dealt,
            "You deal the rows out like cards. A rank's rows lie side by side, so that its shard "
            "is one piece of memory.",
        ),
    ),
)
