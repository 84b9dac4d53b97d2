"""The model states: parameters, gradients and optimizer states, in bytes per rank.

One idea carries all of it. A recipe says which copies of the parameters exist, and in which dtype;
a strategy says of which categories each rank holds only a share; so each copy costs

    elements on the rank  ×  bytes of its dtype

and a ledger lists the copies. What it gives is the steady state, after the first optimizer step
(which makes the moments) and before the next zero_grad, on the rank that holds most. What comes and
goes within a step is not in it.

At one rank every strategy gives the same bytes, but for the optimizer's step counters.
"""

from course_lib.errors import CourseError
from course_lib.ledger.ledger import Ledger, Line
from course_lib.ledger.shards import Share, share
from course_lib.specs import MODEL_STATES, OPTIMIZERS, Copy, ModelSpec, Recipe, Strategy
from course_lib.specs.optimizer import STEP_COUNTER_BYTES
from course_lib.specs.recipe import OPTIMIZER_STATES, PARAMETERS


def model_states(model: ModelSpec, recipe: Recipe, strategy: Strategy) -> Ledger:
    """The ledger of one rank's model states.

    16 bytes per parameter and their sharding are those of ZeRO (arXiv 1910.02054, section 5 and
    table 1), 6 + 12/d and 4 + 16/d those of Megatron-LM's distributed optimizer.

    An optimizer keeps a step counter for each tensor that it updates (see specs.optimizer): one
    where it sees one flat shard, none for a bare count. Offloaded states are on the ledger as the
    host's: all of their bytes, and none of the GPU's.

    Raises CourseError where the strategy shards, or offloads, what the recipe does not keep.
    """
    _check_together(recipe, strategy)
    shares = {category: share(category, model, recipe, strategy) for category in MODEL_STATES}
    lines = [_line(copy, shares[copy.category], strategy) for copy in recipe.copies()]
    updated = shares[OPTIMIZER_STATES]
    if OPTIMIZERS[recipe.optimizer].counts_steps and updated.tensors:
        lines.append(_step_counters(updated, strategy))
    return Ledger(model, recipe, strategy, tuple(lines))


def _line(copy: Copy, held: Share, strategy: Strategy) -> Line:
    return Line(
        category=copy.category,
        what=f"{copy.dtype} {copy.what}",
        bytes=held.elements * copy.bytes,
        formula=f"{held.elements:,} × {copy.bytes} B",
        share=held.words,
        host=copy.category in strategy.offloaded,
    )


def _step_counters(updated: Share, strategy: Strategy) -> Line:
    return Line(
        category=OPTIMIZER_STATES,
        what="step counters",
        bytes=updated.tensors * STEP_COUNTER_BYTES,
        formula=f"{updated.tensors:,} × {STEP_COUNTER_BYTES} B",
        host=OPTIMIZER_STATES in strategy.offloaded,
    )


def _check_together(recipe: Recipe, strategy: Strategy) -> None:
    kept = {copy.category for copy in recipe.copies()} if recipe.trainable else {PARAMETERS}
    keeper = f"{recipe.optimizer} in {recipe.precision}" if recipe.trainable else "a frozen model"
    if strategy.sharded and kept.isdisjoint(strategy.sharded):
        instead = "zero2 to shard the gradients" if recipe.trainable else "zero3 or fsdp"
        raise CourseError(
            f"{strategy.name} has nothing to shard, since {keeper} keeps no optimizer states: "
            f"take ddp, or {instead}."
        )
    if strategy.offload == "optimizer" and OPTIMIZER_STATES not in kept:
        raise CourseError(
            f"There are no optimizer states to offload, since {keeper} keeps none: "
            "take offload none, or another optimizer."
        )
