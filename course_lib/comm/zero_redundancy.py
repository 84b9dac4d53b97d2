"""ZeRO-1 as PyTorch has it: DistributedDataParallel and ZeroRedundancyOptimizer.

DDP all-reduces the gradients, so that every rank has all of them. Each parameter tensor, whole, has
an owner: the only rank that keeps its optimizer states and updates it. After the update the owner
broadcasts the tensor. So gradients move 2P and parameters P: 3P in all, where a reduce_scatter to
the owners and an all_gather, as in the ZeRO paper's stage 1, move 2P. (This holds for
parameters_as_bucket_view=False, the default.)

Source: PyTorch, torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from collections.abc import Sequence

from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.comm.plan import Line, Plan
from course_lib.comm.step import step, title, trained
from course_lib.specs import DTYPE_BYTES, PRECISIONS, Collective, ModelSpec, Recipe, Strategy
from course_lib.specs.checking import whole


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each tensor: the largest first, each to the rank that owns least so far."""
    whole("ranks", ranks)
    owned = [0] * ranks
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = owned.index(min(owned))
        owned[owner[index]] += sizes[index]
    return owner


def zero_redundancy(
    model: ModelSpec,
    recipe: Recipe,
    gpus: int,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int | None = None,
) -> Plan:
    """DDP's buckets, and a broadcast of each trained tensor from its owner, owner by owner."""
    ddp = step(model, recipe, Strategy("ddp", gpus), bucket_bytes, first_bucket_bytes)
    sizes = trained([tensor.numel for tensor in model.tensors()] or [model.parameters], recipe)
    owner = owners(sizes, gpus)
    itemsize = DTYPE_BYTES[PRECISIONS[recipe.precision].parameters]
    in_order = sorted(range(len(sizes)), key=lambda index: (owner[index], -sizes[index]))
    updated = Line(
        tuple(Collective("broadcast", sizes[index], itemsize, gpus) for index in in_order),
        "parameters, each updated tensor from its owner",
    )
    lines = (*ddp.lines, updated) if sizes else ()
    return Plan(title(model, recipe, "ZeroRedundancyOptimizer", gpus), lines)
