"""Units: which parameters are gathered, and freed, together.

ZeRO-3  every block is a unit, and so is each module beside the blocks (embedding, last norm,
        head). A head that is tied to the embedding belongs to its unit.
FSDP    as `wrap` says. 'layer': every block is a unit, and what is left (embedding, last norm,
        head) is the root unit's. 'model': the root unit has all. 'N-params': modules follow one
        another into a unit until it holds N parameters; the root unit has what is left.

FSDP's root unit is not freed after forward, as backward begins with it at once: that is what
fully_shard does unless it is told. A bare count is one block of one tensor.
"""

from dataclasses import dataclass
from itertools import groupby

from course_lib.comm.buckets import buckets, in_use_order
from course_lib.specs import ModelSpec, Strategy, TensorSpec
from course_lib.specs.padding import flat_shard, row_shard

HEAD = "lm_head"


@dataclass(frozen=True)
class Unit:
    """Tensors that are gathered together; `shard` elements of them are each rank's, padded."""

    tensors: tuple[TensorSpec, ...]
    shard: int
    root: bool = False


def units(model: ModelSpec, strategy: Strategy) -> tuple[Unit, ...]:
    """The units of a strategy that shards parameters, in the order of use.

    fsdp and hsdp cut tensors by rows, as fully_shard does, zero3 cuts each of them flat.
    """
    ranks = strategy.shard_ranks
    modules = [tuple(module) for _, module in groupby(in_use_order(model), key=_module)]
    if strategy.name == "zero3":
        groups = _tied(modules) if model.tied_embeddings else modules
        return tuple(Unit(x, sum(flat_shard(tensor.numel, ranks) for tensor in x)) for x in groups)
    groups = _wrapped(modules, strategy.wrap)
    return tuple(
        Unit(group, sum(row_shard(tensor, ranks) for tensor in group), root)
        for group, root in groups
        if group
    )


def _wrapped(modules: list[tuple], wrap: str) -> list[tuple[tuple[TensorSpec, ...], bool]]:
    """Groups of tensors, each with whether it is the root unit's."""
    if wrap == "model":
        return [(_joined(modules), True)]
    if wrap == "layer":
        rest = _joined(x for x in modules if x[0].layer is None)
        return [(rest, True), *((x, False) for x in modules if x[0].layer is not None)]
    cap = int(wrap.removesuffix("-params"))
    sizes = [_numel(module) for module in modules]
    groups = [_joined(modules[i] for i in bucket) for bucket in buckets(sizes, cap)]
    return [(group, _numel(group) < cap) for group in groups]


def _tied(modules: list[tuple]) -> list[tuple]:
    """With the embedding, the first, what a tied head has of its own: Phi's has a bias."""
    heads = [module for module in modules[1:] if _module(module[0]) == HEAD]
    return [_joined([modules[0], *heads]), *(x for x in modules[1:] if x not in heads)]


def _module(tensor: TensorSpec) -> object:
    """What fully_shard wraps: a block, or a module beside the blocks."""
    return tensor.name.rpartition(".")[0] if tensor.layer is None else tensor.layer


def _numel(tensors: tuple[TensorSpec, ...]) -> int:
    return sum(tensor.numel for tensor in tensors)


def _joined(modules) -> tuple[TensorSpec, ...]:
    return tuple(tensor for module in modules for tensor in module)
