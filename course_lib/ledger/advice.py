"""The one change to a job that would lower its peak most."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from course_lib.errors import CourseError
from course_lib.ledger.execution import Execution
from course_lib.ledger.peak import peak
from course_lib.ledger.replay import Peak
from course_lib.specs import ModelSpec, Recipe, Strategy
from course_lib.specs.recipe import OPTIMIZER_STATES, PARAMETERS

CHUNKS = 8  # of the loss
WORTH = 0.98  # of the peak: what lowers it by less is not worth saying


@dataclass(frozen=True)
class Change:
    """What to change, and the peak that then is."""

    what: str
    peak: Peak


def best_change(
    model: ModelSpec, recipe: Recipe, strategy: Strategy, execution: Execution, **tuning
) -> Change | None:
    """Of the changes below, the one with the lowest peak; None where none lowers it by 2%."""
    now = peak(model, recipe, strategy, execution, **tuning)
    found = []
    for what, *job in _changes(recipe, strategy, execution):
        with suppress(CourseError):  # there is nothing to shard, or to offload
            found.append(Change(what, peak(model, *job, **tuning)))
    best = min(found, key=lambda change: change.peak.bytes, default=None)
    return best if best and best.peak.bytes < WORTH * now.bytes else None


def _changes(
    recipe: Recipe, strategy: Strategy, execution: Execution
) -> Iterator[tuple[str, Recipe, Strategy, Execution]]:
    if recipe.checkpointing != "full" and recipe.trainable:
        yield "full checkpointing", replace(recipe, checkpointing="full"), strategy, execution
    if recipe.micro_batch > 1:
        half = recipe.micro_batch // 2
        accum = recipe.grad_accum * 2
        what = f"micro-batches of {half}, and {accum} of them a step"
        yield what, replace(recipe, micro_batch=half, grad_accum=accum), strategy, execution
    if execution.loss_chunks == 1:
        yield (
            f"the loss in {CHUNKS} chunks of tokens",
            recipe,
            strategy,
            replace(execution, loss_chunks=CHUNKS),
        )
    if strategy.gpus > 1 and PARAMETERS not in strategy.sharded:
        yield "fsdp", recipe, replace(strategy, name="fsdp"), execution
    if OPTIMIZER_STATES not in strategy.offloaded:
        yield "the optimizer offloaded", recipe, replace(strategy, offload="optimizer"), execution
