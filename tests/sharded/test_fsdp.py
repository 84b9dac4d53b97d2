"""FSDP trains as PyTorch's fully_shard and as one process do, and sends what fully_shard sends.

Losses, norms and parameters are the same within rounding, over 20 steps. Collectives are the same
in kind, order, elements and dtype. Where they differ:

one rank          fully_shard issues no collectives, ours go the same way as on many ranks.
replicas          fully_shard begins the all_reduce of a unit's gradients right after its
                  reduce_scatter, and waits for both; ours goes on with the next unit's backward.
nothing ahead     Ours can gather nothing ahead in backward; fully_shard has one unit at least.
evaluation        fully_shard leaves the root unit whole after a forward without gradients, and so
                  gathers it once less in the next. Ours frees it, as parameters may change.
unused            Of a unit in which some parameters got no gradient, fully_shard reduces the others
                  alone. Ours reduces zeros for them, as another rank may have some.
"""

from dataclasses import replace
from functools import partial

from fsdp_cases import (
    BF16,
    Case,
    Tower,
    check,
    frozen,
    inside,
    outside,
    tied_in_a_unit,
    twice,
    unused,
    with_one_in_vain,
    without_the_second,
    written_to,
)
from torch import nn
from zero_cases import (
    TIED,
    Decoder,
    one_thread,  # noqa: F401 (a fixture)
)

from course_lib.sharded import wrapping

RESHARDS = "reshard_after_forward"
CLIPPED = {"max_norm": 0.05}


def ahead(count: int, **options) -> dict:
    return {"forward_prefetch": count, "backward_prefetch": count, "gathers": 9} | options


def whole(model: nn.Module) -> list[nn.Module]:
    return [model]


def linears(model: nn.Module) -> list[nn.Module]:
    return wrapping.by_class(model, nn.Linear)


FEATURES = {
    "freed": Case(**CLIPPED),
    "kept": Case(options={RESHARDS: False}),
    "nothing ahead": Case(options=ahead(0), log="sorted"),
    "two ahead": Case(options=ahead(2)),
    "three ahead, kept": Case(options=ahead(3, **{RESHARDS: False})),
    "one way at a time": Case(options={"gathers": 1, "forward_prefetch": 3}),
    "16 bits": Case(options={"precision": BF16}),
    "16 bits, offload, no sync": Case(
        options={"precision": BF16, "offload": True}, micro_batches=2, no_sync=True
    ),
    "frozen in units": Case(frozen("up", "stem.bias"), **CLIPPED),
    "frozen units": Case(frozen("blocks.1", "stem"), options={RESHARDS: False}),
    "frozen, checkpointed": Case(partial(frozen("blocks.0", "stem"), outside(False))),
    "tied": Case(tied_in_a_unit, micro_batches=2),
    "accumulation": Case(micro_batches=3, **CLIPPED),
    "accumulation, no sync": Case(micro_batches=3, no_sync=True, **CLIPPED),
    "offload": Case(options={"offload": True}, **CLIPPED),
    "checkpoint(unit)": Case(partial(Tower, outside(False))),
    "checkpoint(unit), reentrant": Case(partial(Tower, outside(True))),
    "unit(checkpoint)": Case(inside(False)),
    "unit(checkpoint), reentrant": Case(inside(True), options={"precision": BF16}),
    "every Linear": Case(wrap=linears),
    "every Linear, checkpointed": Case(partial(Tower, outside(True)), wrap=linears),
    "whole": Case(wrap=whole, micro_batches=2),
    "by size": Case(wrap=partial(wrapping.by_size, least=40)),
    "twice": Case(partial(Tower, twice)),
    "twice, no sync": Case(partial(Tower, twice), micro_batches=2, no_sync=True),
    "one unused": Case(partial(Tower, without_the_second)),
    "one in vain": Case(partial(Tower, with_one_in_vain)),
    "unused in a unit": Case(unused, log="zeros for what is unused"),
    "views, written to": Case(partial(Tower, written_to)),
    "tied decoder": Case(partial(Decoder, TIED)),
    "evaluation": Case(evaluates=True, log="the root is gathered once more"),
}
ON_FOUR = {
    "freed": Case(**CLIPPED),
    "resharded to two": Case(options={RESHARDS: 2}),
    "resharded to two, checkpointed": Case(partial(Tower, outside(True)), options={RESHARDS: 2}),
    "resharded to two, evaluation": Case(
        options={RESHARDS: 2}, evaluates=True, log="the root is gathered once more"
    ),
    "replicas": Case(shape=(2, 2), **CLIPPED, log="sorted"),
    "replicas, no sync, 16 bits": Case(
        options={"precision": BF16}, shape=(2, 2), micro_batches=2, no_sync=True, log="sorted"
    ),
}


def test_each_feature_trains_as_fully_shard_and_as_one_process():
    check(FEATURES, world_size=2)


def test_among_four_ranks_there_are_neighbours_and_replicas():
    check(ON_FOUR, world_size=4)


def test_uneven_shards():
    names = "freed", "tied", "16 bits, offload, no sync"
    check({name: FEATURES[name] for name in names}, world_size=3)


def test_empty_shards():
    """Of 5 rows on 8 ranks three have none, of 7 one, of the head's 2 six."""
    check({"freed": ON_FOUR["freed"]}, world_size=8)


def test_one_rank():
    check({"freed": replace(FEATURES["freed"], log="collectives of one rank")}, world_size=1)
