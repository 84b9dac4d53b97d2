"""Lesson 05, ZeRO-1: 05-bytes and 05-partition, which need no ranks.

The exercises in which ranks communicate are in `zero1_…`.
"""

import math

import torch
import torch.nn.functional as F

from course_lib import ledger
from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded import flat
from course_lib.specs.padding import flat_shard
from grading.exercises import zero1_runs
from grading.exercises.zero1_clip import CLIP
from grading.exercises.zero1_gather import GATHER
from grading.exercises.zero1_update import UPDATE

# --- 05-bytes: what a rank of ZeRO-1 holds ------------------------------------------------------

MIXED, FP32 = "mixed precision", "fp32"


def zero1_bytes(parameters, ranks, mixed):
    if mixed:
        weight, gradient, states = 2, 2, 4 + 4 + 4  # states: master, momentum, variance
    else:
        weight, gradient, states = 4, 4, 4 + 4
    return (weight + gradient) * parameters + states * parameters // ranks


def _what_ddp_holds_less_the_rest(parameters, ranks, mixed):
    return 16 * parameters - (12 if mixed else 8) * (parameters - parameters // ranks)


def _bytes(weight, gradient, states, fp32=(4, 4, 8)):
    """Bytes per parameter of a rank, as functions of the ranks where they are no numbers."""

    def answer(parameters, ranks, mixed):
        lines = (weight, gradient, states) if mixed else fp32
        per = sum(line(ranks) if callable(line) else line for line in lines)
        return round(per * parameters)

    return answer


def _over(of):
    return lambda ranks: of / ranks


def _bytes_cases(parameters: int, ranks: int) -> list[Case]:
    return [
        Case(f"{parameters:,} parameters on {ranks} ranks", (parameters, ranks, mixed), part)
        for part, mixed in ((MIXED, True), (FP32, False))
    ]


BYTES = Exercise(
    id="05-bytes",
    title="Bytes on a rank of ZeRO-1",
    task="Return the bytes of model states on one rank of ZeRO-1 with AdamW.",
    points={MIXED: 1, FP32: 1},
    reference=zero1_bytes,
    library=(ledger.model_states,),
    alternatives=(_what_ddp_holds_less_the_rest,),
    cases=(*_bytes_cases(1000, 4), *_bytes_cases(8_000_000, 8)),
    fresh=lambda rng: _bytes_cases(192 * rng.randrange(10**5, 10**8), rng.choice((3, 16, 64))),
    compare=close(1e-9),
    nudge="Weights and gradients are whole on every rank, the optimizer's states are cut in N.",
    misconceptions=(
        Misconception(
            "nothing sharded",
            _bytes(2, 2, 12, (4, 4, 8)),
            "That is DDP: all states on every rank. Of the optimizer's a rank of ZeRO-1 keeps 1/N.",
        ),
        Misconception(
            "everything sharded",
            _bytes(_over(2), _over(2), _over(12), (_over(4), _over(4), _over(8))),
            "You sharded all of it, which is ZeRO-3. ZeRO-1 leaves weights and gradients whole.",
        ),
        Misconception(
            "gradients sharded, too",
            _bytes(2, _over(2), _over(12), (4, _over(4), _over(8))),
            "You sharded the gradients too, which is ZeRO-2. Backward of ZeRO-1 makes them whole, "
            "and they stay.",
        ),
        Misconception(
            "master weights on every rank, or fp32 for all",
            _bytes(2, 2, lambda n: 4 + 8 / n, (4, 4, _over(8))),
            "8P + 8P/N is fp32. In mixed precision weights and gradients have 2 bytes each, and "
            "the fp32 master weights are sharded with the moments: only the update needs them.",
        ),
        Misconception(
            "no master weights",
            _bytes(2, 2, _over(8), (4, 4, _over(8))),
            "In mixed precision the optimizer has an fp32 master of each weight, too: 4 + 4 + 4.",
        ),
        Misconception(
            "mixed precision for all",
            _bytes(2, 2, _over(12), (2, 2, _over(12))),
            "4P + 12P/N is mixed precision. In fp32 weights and gradients have 4 bytes each, and "
            "there is no master: 8P + 8P/N.",
        ),
        Misconception(
            "masters in fp32",
            _bytes(2, 2, _over(12), (4, 4, _over(12))),
            "In fp32 the weights are their own masters: the states are 8 bytes, two moments.",
        ),
    ),
)

# --- 05-partition: which elements a rank owns ---------------------------------------------------


def shard_of(values, rank, world_size):
    size = -(-len(values) // world_size)  # S
    padded = F.pad(values, (0, size * world_size - len(values)))  # [N·S]
    return padded[rank * size : (rank + 1) * size]


def _filled(values, rank, world_size):
    size = flat_shard(len(values), world_size)
    shard = torch.zeros(size)
    own = values[rank * size : (rank + 1) * size]
    shard[: len(own)] = own
    return shard


def _padded(values, world_size, before=0):
    missing = -len(values) % world_size
    return F.pad(values, (missing if before else 0, 0 if before else missing))


def _rank_by_rank(values, rank, world_size):
    size = len(values) // world_size
    last = rank == world_size - 1
    return values[rank * size :] if last else values[rank * size : (rank + 1) * size]


def _one_more_for_the_first(values, rank, world_size):
    return values.tensor_split(world_size)[rank]


def _always_padded(values, rank, world_size):
    size = len(values) // world_size + 1
    return F.pad(values, (0, size * world_size - len(values)))[rank * size :][:size]


def _partition_cases(elements: int, world_size: int) -> list[Case]:
    values = [float(i + 1) for i in range(elements)]
    what = "one element" if elements == 1 else f"{elements} elements"
    return [
        Case(f"{what}, rank {rank} of {world_size}", (values, rank, world_size), part)
        for rank in range(world_size)
        for part in ("even" if elements % world_size == 0 else "uneven",)
    ]


_SHORT = (
    "Your last shards are short, or missing. A collective gives all ranks equally many elements: "
    "fill them up with zeros."
)

PARTITION = Exercise(
    id="05-partition",
    title="Cut a flat buffer, with padding",
    task="Return this rank's shard of the flat tensor: S elements, zeros where there are none.",
    points={"even": 1, "uneven": 2},
    reference=shard_of,
    library=(flat.Flat.shard,),
    alternatives=(_filled,),
    cases=(*_partition_cases(6, 3), *_partition_cases(7, 3), *_partition_cases(5, 4)),
    fresh=lambda rng: _partition_cases(rng.randrange(1, 40), rng.choice((5, 8))),
    run=zero1_runs.cut,
    compare=close(1e-6),
    nudge="S is P / N, rounded up. Pad to N·S, then rank r has S elements from r·S on.",
    misconceptions=(
        Misconception(
            "rounded down",
            lambda x, r, n: x[r * (len(x) // n) : (r + 1) * (len(x) // n)],
            "You round P / N down: the last elements have no owner, and would never be updated.",
        ),
        Misconception(
            "the rest to the last rank",
            _rank_by_rank,
            "Your last rank takes the rest, so its shard is longer. One reduce_scatter gives all "
            "ranks equally many elements: round up, and pad.",
        ),
        Misconception(
            "no padding",
            lambda x, r, n: x[r * math.ceil(len(x) / n) : (r + 1) * math.ceil(len(x) / n)],
            _SHORT,
        ),
        Misconception(
            "torch's chunk",
            lambda x, r, n: x.chunk(n)[r],
            _SHORT,
            "chunk rounds up, as it should, but the last chunk is short, and some may be missing.",
        ),
        Misconception(
            "one more for the first ranks",
            _one_more_for_the_first,
            "Your shards differ in length by one. Balanced, but a collective wants equal ones: "
            "round up for all, and pad at the end.",
        ),
        Misconception(
            "dealt out",
            lambda x, r, n: _padded(x, n)[r::n],
            "You deal elements out one by one. A shard is S elements in a row, so that it is one "
            "slice of the buffer, which a collective can move as it is.",
        ),
        Misconception(
            "padding in front",
            lambda x, r, n: _padded(x, n, before=1).view(n, -1)[r],
            "You pad in front, which moves every element. Padding comes at the end, where it can "
            "be dropped by keeping the first P.",
        ),
        Misconception(
            "always padded",
            _always_padded,
            "You add one to P // N even where nothing is left over: every rank gets an element "
            "too many. Round up.",
        ),
        Misconception(
            "a shard for every element",
            lambda x, r, n: _padded(x, n).view(-1, n)[r] if len(x) > r * n else x[:0],
            "You cut pieces of N elements. There are N pieces, of S elements each.",
        ),
    ),
)

EXERCISES = (BYTES, PARTITION, UPDATE, GATHER, CLIP)
