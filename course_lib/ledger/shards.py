"""How many elements of the parameters one rank holds: the rank that holds most.

Three ways to cut P parameters for N ranks; each leaves some rank with more than P/N elements.

flat       ZeRO-1 and 2 lay all tensors end to end in one buffer, pad it to a multiple of N, and cut
           it into N equal shards: ceil(P/N).
by tensor  ZeRO-3 pads and cuts every tensor by itself, as DeepSpeed does: a rank can then put a
           tensor together without its neighbours. The sum of ceil(numel/N).
by row     FSDP2 cuts every tensor along its first dimension, without padding it: rank 0 holds
           ceil(rows/N) rows of each, and the last ranks of a short tensor hold nothing.

A bare count has no tensors to cut one by one, and is cut flat under every strategy.
"""

from dataclasses import dataclass
from functools import lru_cache

from course_lib.specs import ModelSpec, Recipe, Strategy
from course_lib.specs.padding import flat_shard, row_shard
from course_lib.specs.recipe import PARAMETERS

FLAT = ("zero1", "zero2")
BY_TENSOR = ("zero3",)


@dataclass(frozen=True)
class Share:
    """What one rank holds: `elements`, and in `words` why so many, '' where it holds them all.

    `tensors` counts what an optimizer would see as separate tensors, 0 for a bare count.
    """

    elements: int
    tensors: int
    words: str


def share(category: str, model: ModelSpec, recipe: Recipe, strategy: Strategy) -> Share:
    """The share of one rank in a copy of the parameters that belongs to `category`.

    Frozen parameters belong to 'parameters' alone. A fraction does not say which tensors are
    trained, so where each is cut by itself, the trained share is taken in proportion, rounded up.
    """
    total, ranks = model.parameters, strategy.shard_ranks
    count = total if category == PARAMETERS else recipe.trained(total)
    tensors = _ceil(len(model.tensors()) * count, total)
    part = "" if count == total else f"{recipe.trainable:g} of {total:,} trained"
    if category not in strategy.sharded:
        return Share(count, tensors, part)
    if model.is_bare or strategy.name in FLAT:
        return _flat(count, ranks, part, buffers=min(tensors, 1))
    held, words = _by_tensor(model, ranks) if strategy.name in BY_TENSOR else _by_row(model, ranks)
    if part:
        words = f"{recipe.trainable:g} of {held:,} trained, which are {words}"
    return Share(_ceil(held * count, total), tensors, words)


def _flat(count: int, ranks: int, part: str, buffers: int) -> Share:
    elements = flat_shard(count, ranks)
    padding = elements * ranks - count
    whole = f"({count:,} + {padding:,} of padding)" if padding else f"{count:,}"
    words = [f"{whole} / {ranks:,}", *([part] if part else [])]
    return Share(elements, buffers, ", ".join(words))


@lru_cache(maxsize=256)
def _by_tensor(model: ModelSpec, ranks: int) -> tuple[int, str]:
    held = sum(flat_shard(tensor.numel, ranks) for tensor in model.tensors())
    return held, _words("elements", held, model, ranks)


@lru_cache(maxsize=256)
def _by_row(model: ModelSpec, ranks: int) -> tuple[int, str]:
    held = sum(row_shard(tensor, ranks) for tensor in model.tensors())
    return held, _words("rows", held, model, ranks)


def _words(unit: str, held: int, model: ModelSpec, ranks: int) -> str:
    above = held - _ceil(model.parameters, ranks)
    uneven = f", {above:,} above an even share" if above else ""
    return f"ceil({unit} / {ranks:,}) {unit} of each of {len(model.tensors()):,} tensors{uneven}"


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
