"""Units: which parameters are gathered, and freed, together.

ZeRO-3  every block is a unit, and so is each module beside the blocks (embedding, last norm,
        head). A head that is tied to the embedding belongs to its unit.
FSDP    modules are chosen to be units. A parameter belongs to the innermost that has it, and what
        is left to the root unit, which is the model. `wrap` chooses: 'layer' every block; 'model'
        none; 'N-params' the smallest modules with N parameters or more besides those of smaller
        units, bottom up, as sharded.wrapping.by_size and PyTorch's size_based_auto_wrap_policy.
        Or they are chosen by hand, by their names.

FSDP's root unit is not freed after forward, as backward begins with it at once: that is what
fully_shard does unless it is told. A bare count is one block of one tensor.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from course_lib.comm.buckets import in_use_order
from course_lib.errors import CourseError
from course_lib.specs import ModelSpec, Strategy, TensorSpec
from course_lib.specs.padding import flat_shard, row_shard

HEAD = "lm_head"
ROOT = ""
# What a checkpoint around a block puts into the names of all that is inside.
WRAPPED = "_checkpoint_wrapped_module"


@dataclass(frozen=True)
class Unit:
    """Tensors that are gathered together; `shard` elements of them are each rank's, padded.

    `name` is that of the module which they are gathered for.
    """

    tensors: tuple[TensorSpec, ...]
    shard: int
    root: bool = False
    name: str = ROOT


def units(
    model: ModelSpec, strategy: Strategy, by_hand: Collection[str] | None = None
) -> tuple[Unit, ...]:
    """The units of a strategy that shards parameters, in the order of use, but the root unit first.

    fsdp and hsdp cut tensors by rows, as fully_shard does, zero3 cuts each of them flat. `by_hand`
    are names of modules, as in named_modules(), in place of what `wrap` chooses.

    Errors: CourseError where a name is that of no module that has parameters.
    """
    return _units(model, strategy, None if by_hand is None else frozenset(by_hand))


@lru_cache(maxsize=64)
def _units(
    model: ModelSpec, strategy: Strategy, by_hand: frozenset[str] | None
) -> tuple[Unit, ...]:
    ranks = strategy.shard_ranks
    if strategy.name == "zero3":
        return tuple(
            Unit(x, sum(flat_shard(tensor.numel, ranks) for tensor in x), name=name)
            for name, x in _beside_blocks(model)
        )
    return tuple(
        Unit(x, sum(row_shard(tensor, ranks) for tensor in x), name == ROOT, name)
        for name, x in _by_modules(model, strategy.wrap, by_hand)
    )


@lru_cache(maxsize=64)
def _beside_blocks(model: ModelSpec) -> tuple[tuple[str, tuple[TensorSpec, ...]], ...]:
    """zero3's units, however many ranks there are."""
    modules = [(name, tuple(x)) for name, x in groupby(in_use_order(model), key=_beside)]
    return tuple(_tied(modules) if model.tied_embeddings else modules)


@lru_cache(maxsize=64)
def _by_modules(
    model: ModelSpec, wrap: str, by_hand: frozenset[str] | None
) -> tuple[tuple[str, tuple[TensorSpec, ...]], ...]:
    """fsdp's units, however many ranks there are."""
    chosen = _wrapped(model, wrap) if by_hand is None else _known(by_hand, in_use_order(model))
    return tuple((name, tuple(x)) for name, x in _assigned(model, chosen).items() if x)


def plain(name: str) -> str:
    """The name that a module or a parameter has without checkpoints around modules."""
    if WRAPPED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def _assigned(model: ModelSpec, chosen: Collection[str]) -> dict[str, list[TensorSpec]]:
    """The tensors of the root, and of each chosen module that has some of its own."""
    untied = _untied(model)
    groups = {ROOT: list(in_use_order(model)[: -len(untied)])}
    for tensor in untied:
        owner = next((name for name in _around(tensor) if name in chosen), ROOT)
        groups.setdefault(owner, []).append(tensor)
    return groups


def _wrapped(model: ModelSpec, wrap: str) -> set[str]:
    """The names of the modules that `wrap` chooses."""
    if wrap == "model":
        return set()
    if wrap == "layer":
        return {_beside(x) for x in in_use_order(model) if x.layer is not None}
    return _by_size(_untied(model), int(wrap.removesuffix("-params")))


def _untied(model: ModelSpec) -> tuple[TensorSpec, ...]:
    """All tensors, but an embedding that is the head, too: two units cannot have it, so the root
    has."""
    tensors = in_use_order(model)
    return tensors[1:] if model.tied_embeddings else tensors


def _by_size(tensors: Iterable[TensorSpec], least: int) -> set[str]:
    """Modules with `least` parameters or more, besides those of smaller ones: bottom up."""
    left: dict[str, int] = {}  # parameters that are in no unit yet, of each module
    for tensor in tensors:
        module = next(_around(tensor))
        left[module] = left.get(module, 0) + tensor.numel
    around = {name for tensor in tensors for name in _around(tensor)}
    # A ModuleList is not called, so it is no unit. Its children have numbers for names.
    lists = {name.rpartition(".")[0] for name in around if name.rpartition(".")[2].isdigit()}
    chosen = set()
    deepest = max(name.count(".") for name in left)
    for depth in range(deepest, -1, -1):
        for name in [name for name in left if name.count(".") == depth]:
            parent, _, _ = name.rpartition(".")
            if left[name] >= least and name not in lists:
                chosen.add(name)
            elif parent:
                left[parent] = left.get(parent, 0) + left[name]
    return chosen


def _known(names: Collection[str], tensors: Iterable[TensorSpec]) -> set[str]:
    """The names, plain, if each is that of a module around some tensor."""
    around = {name for tensor in tensors for name in _around(tensor)}
    for name in names:
        if plain(name) not in around | {ROOT}:
            raise CourseError(
                f"{name!r} was to be a unit, and no module of that name has parameters of its own: "
                "give names out of named_modules(), of modules that have some."
            )
    return {plain(name) for name in names} - {ROOT}


def _around(tensor: TensorSpec) -> Iterable[str]:
    """The names of the modules around a tensor, from the inside."""
    parts = tensor.name.split(".")
    if len(parts) == 1:  # a bare count: as if it were a block
        yield tensor.name
    for end in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:end])


def _tied(modules: list[tuple[str, tuple]]) -> list[tuple[str, tuple]]:
    """With the embedding, the first, what a tied head has of its own: Phi's has a bias."""
    (name, first), *others = modules
    heads = [tensor for other, module in others if other == HEAD for tensor in module]
    return [(name, (*first, *heads)), *(x for x in others if x[0] != HEAD)]


def _beside(tensor: TensorSpec) -> str:
    """The name of the block, or of the module beside the blocks, that has it."""
    if tensor.layer is None:
        return tensor.name.rpartition(".")[0]
    blocks, _, _ = tensor.name.partition(f".{tensor.layer}.")
    return f"{blocks}.{tensor.layer}" if "." in tensor.name else tensor.name
