"""What a rank sends and receives in one optimizer step of `grad_accum` micro-batches.

ddp    Every rank has all gradients of its own micro-batches. Once a step, an all_reduce of each
       bucket averages them (under `no_sync` until the last micro-batch).
zero1  Once a step, a reduce_scatter gives each rank the average of the shard that it updates; then
       an all_gather gives all ranks all that was updated: bucket by bucket of one flat space.
zero2  A rank keeps its shard of the gradients alone, so every micro-batch is reduce-scattered.
zero3  A rank keeps its shard of the parameters too. Every micro-batch gathers each unit (tensors
       that are needed together, see comm.units) for forward, gathers it again for backward, and
       reduce-scatters its gradients.
fsdp   As zero3, by units of its own. The root unit is not gathered again; nor is any where
       reshard_after_forward is False. Where it is a number, a rank has kept more than its shard,
       and so many ranks gather for backward.
hsdp   As fsdp within a node; then an all_reduce averages each shard's gradient between nodes.

Collectives run at the width of what they move: gradients at that of the recipe's gradients,
parameters at that of its parameters. Under 'fsdp-bf16' a strategy that gathers parameters casts
them to bf16 first, so both move as bf16.

Activations that are checkpointed inside of units are recomputed from what backward gathers anyhow.
Where a checkpoint is around a unit, and recomputing it is a forward like another that frees it
after, as in FSDP1 with reentrant checkpoints, it is gathered a third time: `recompute_gathers`.

What offload moves between a GPU and its host is in comm.offload.

Not counted: what only the first step needs, the gradient norm and the loss. At one rank the
collectives are listed and move 0 bytes; DDP does issue them, fully_shard leaves them out.

Sources: ZeRO, arXiv 1910.02054, section 7; PyTorch, torch/distributed/fsdp/_fully_shard.
"""

from collections.abc import Collection, Iterable, Iterator

from course_lib.comm.buckets import BUCKET_BYTES, buckets, caps, flat_piece, in_use_order
from course_lib.comm.plan import Line, Plan
from course_lib.comm.units import units
from course_lib.specs import DTYPE_BYTES, PRECISIONS, Collective, ModelSpec, Recipe, Strategy
from course_lib.specs.padding import flat_shard

GATHERED_AS = {"fsdp-bf16": "bf16"}  # precision: dtype in which parameters are gathered
MICRO_BATCH = "micro-batch"
NO_CAP = 10**15  # bytes


def step(
    model: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int | None = None,
    first_step: bool = False,
    recompute_gathers: bool = False,
    by_hand: Collection[str] | None = None,
) -> Plan:
    """The collectives of one step, on the rank that moves most.

    `bucket_bytes` is the cap of the buckets of ddp, zero1 and zero2, `first_bucket_bytes` that of
    ddp's first: as in DDP 1 MiB where `bucket_bytes` is the default, else the same as the others'.
    The plan is that of the steady state; with `first_step`, ddp has one bucket of all gradients.
    `by_hand` are fsdp's units by name, see comm.units.

    Frozen parameters have no gradients. A fraction does not say which tensors are trained, so each
    tensor is taken to be, in proportion.
    """
    if strategy.name == "ddp":
        both = (NO_CAP, NO_CAP) if first_step else caps(bucket_bytes, first_bucket_bytes)
        lines = [_all_reduced(model, recipe, strategy, *both)]
    elif strategy.name in ("zero1", "zero2"):
        lines = _flat(model, recipe, strategy, bucket_bytes)
    else:
        lines = _gathered(model, recipe, strategy, recompute_gathers, by_hand)
    issued = tuple(line for line in lines if line.collectives)
    return Plan(title(model, recipe, strategy.name, strategy.gpus), issued)


def gathered_as(recipe: Recipe) -> str:
    """The dtype in which parameters are gathered."""
    return GATHERED_AS.get(recipe.precision, PRECISIONS[recipe.precision].parameters)


def reduced_as(recipe: Recipe) -> str:
    """The dtype in which strategies that gather parameters reduce gradients."""
    return GATHERED_AS.get(recipe.precision, PRECISIONS[recipe.precision].gradients)


def trained(sizes: list[int], recipe: Recipe) -> list[int]:
    """The trained part of each of `sizes` elements, in proportion, to an exact total; no zeros."""
    parts, total, before = [], 0, 0
    for size in sizes:
        total += size
        parts.append(recipe.trained(total) - before)
        before += parts[-1]
    return [part for part in parts if part]


def title(model: ModelSpec, recipe: Recipe, strategy: str, gpus: int) -> str:
    """The job in one line."""
    ranks = "1 rank" if gpus == 1 else f"{gpus:,} ranks"
    batches = f"{recipe.grad_accum} micro-batch" + ("es" if recipe.grad_accum > 1 else "")
    return (
        f"{model.name}, {model.parameters:,} parameters; {recipe.precision}; {strategy} on {ranks},"
        f" {batches} a step"
    )


def _all_reduced(
    model: ModelSpec, recipe: Recipe, strategy: Strategy, cap: int, first_cap: int
) -> Line:
    itemsize = DTYPE_BYTES[PRECISIONS[recipe.precision].gradients]
    gradients = trained([tensor.numel for tensor in in_use_order(model)], recipe)[::-1]
    made = buckets([elements * itemsize for elements in gradients], cap, first_cap)
    elements = [sum(gradients[index] for index in bucket) for bucket in made]
    return Line(
        tuple(Collective("all_reduce", count, itemsize, strategy.gpus) for count in elements),
        "buckets of gradients, averaged over all ranks",
    )


def _flat(
    model: ModelSpec, recipe: Recipe, strategy: Strategy, bucket_bytes: int
) -> Iterator[Line]:
    """A bucket has a piece of every rank's shard. All but the last are full, and so are alike."""
    precision, ranks = PRECISIONS[recipe.precision], strategy.gpus
    shard = flat_shard(recipe.trained(model.parameters), ranks)
    piece = flat_piece(bucket_bytes, DTYPE_BYTES[precision.parameters], ranks)
    cut = ((piece, shard // piece), (shard % piece, 1))
    pieces = {size: times for size, times in cut if size * times}
    rounds = (MICRO_BATCH, recipe.grad_accum) if strategy.name == "zero2" else ("step", 1)
    yield Line(
        _each("reduce_scatter", pieces, precision.gradients, ranks),
        "buckets of gradients, averaged into shards",
        *rounds,
        times=tuple(pieces.values()),
    )
    yield Line(
        _each("all_gather", pieces, precision.parameters, ranks),
        "buckets of updated parameters, to all ranks",
        times=tuple(pieces.values()),
    )


def _gathered(
    model: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    recompute_gathers: bool,
    by_hand: Collection[str] | None,
) -> Iterator[Line]:
    ranks, near = strategy.shard_ranks, strategy.near_ranks
    gathered, reduced = gathered_as(recipe), reduced_as(recipe)
    each_time = (MICRO_BATCH, recipe.grad_accum)

    cut = units(model, strategy, by_hand)
    shards = [unit.shard for unit in cut]
    freed = [unit.shard for unit in cut if strategy.reshard_after_forward and not unit.root]
    gradients = trained_shards(shards, model.parameters, recipe)
    kept = [flat_shard(ranks * shard, near) for shard in freed if gradients]  # after forward
    yield Line(
        _each("all_gather", shards, gathered, ranks),
        "parameters of each unit, for forward",
        *each_time,
    )
    if recompute_gathers:
        yield Line(
            _each("all_gather", kept, gathered, near),
            "parameters again, to recompute units that a checkpoint is around",
            *each_time,
        )
    yield Line(
        _each("all_gather", kept, gathered, near),
        "parameters again for backward; forward freed them",
        *each_time,
    )
    yield Line(
        _each("reduce_scatter", gradients, reduced, ranks),
        "gradients of each unit, averaged into shards",
        *each_time,
    )
    if strategy.name == "hsdp":
        itemsize = DTYPE_BYTES[reduced]
        yield Line(
            tuple(Collective("all_reduce", x, itemsize, strategy.replicas) for x in gradients),
            "shards of gradients, averaged between nodes",
            *each_time,
            between_nodes=True,
        )


def _each(kind: str, shards: Iterable[int], dtype: str, ranks: int) -> tuple[Collective, ...]:
    """One collective for each shard, whose buffer is the shards of all ranks."""
    return tuple(Collective(kind, ranks * shard, DTYPE_BYTES[dtype], ranks) for shard in shards)


def trained_shards(shards: list[int], parameters: int, recipe: Recipe) -> list[int]:
    """The trained part of each shard, rounded up, as all ranks' are of one size; no zeros."""
    part = recipe.trained(parameters)
    return [flat_shard(shard * part, parameters) for shard in shards if part]
