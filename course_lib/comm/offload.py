"""Offload: what crosses between a GPU and its host's memory, beside what crosses among ranks.

all        The host has shards of parameters and of gradients, and updates them. A unit's shards go
           to the GPU each time that it is gathered from them; what its reduce_scatter gives comes
           back. (Where reshard_after_forward is a number, backward gathers what stayed on GPUs.)
optimizer  The host updates: once a step a rank's share of the gradients comes to it, and its share
           of the updated parameters goes back.

Each moves in the dtype in which it is held.
"""

from collections.abc import Collection
from dataclasses import dataclass

from course_lib.comm.step import trained_shards
from course_lib.comm.units import units
from course_lib.specs import DTYPE_BYTES, PRECISIONS, ModelSpec, Recipe, Strategy, human
from course_lib.specs.padding import flat_shard
from course_lib.specs.recipe import PARAMETERS


@dataclass(frozen=True)
class Offloaded:
    """Bytes of one rank and step, each way."""

    to_device: int = 0
    to_host: int = 0

    @property
    def total(self) -> int:
        return self.to_device + self.to_host

    def __str__(self) -> str:
        return f"{human(self.to_device)} to the GPU and {human(self.to_host)} back, a step."


def offloaded(
    model: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    by_hand: Collection[str] | None = None,
) -> Offloaded:
    """What one step moves between GPU and host, on the rank that has most; see comm.step."""
    if strategy.offload == "none":
        return Offloaded()
    precision = PRECISIONS[recipe.precision]
    parameter, gradient = DTYPE_BYTES[precision.parameters], DTYPE_BYTES[precision.gradients]
    if PARAMETERS not in strategy.sharded:
        share = flat_shard(recipe.trained(model.parameters), strategy.shard_ranks)
        return Offloaded(share * parameter, share * gradient)
    cut = units(model, strategy, by_hand)
    shards = [unit.shard for unit in cut]
    gradients = sum(trained_shards(shards, model.parameters, recipe))
    if strategy.offload == "optimizer":
        return Offloaded(gradients * parameter, gradients * gradient)
    again = strategy.reshard_after_forward is True and gradients
    gathered = sum(shards) + sum(unit.shard for unit in cut if again and not unit.root)
    rounds = recipe.grad_accum
    return Offloaded(rounds * gathered * parameter, rounds * gradients * gradient)
