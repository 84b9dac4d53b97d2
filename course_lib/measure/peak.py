"""The peak of a step, predicted: the ledger's resident bytes, one micro-batch's work, and buffers.

A stage changes what a rank holds, not what it computes. So the events of one micro-batch, measured
in one process (see `work`), are replayed here under the rules of a stage: what is resident, which
gradients are kept, moved or freed, which buffers are there meanwhile, and what the update needs.
The peak is the most that ever comes together.

As in the ledger, the rank is the one that holds most, and the step is not the first.
"""

from collections.abc import Sequence

from course_lib.measure.replay import Ddp, Peak, Tuning, Zero1, Zero2
from course_lib.measure.replay_fsdp import Fsdp
from course_lib.measure.replay_zero3 import Zero3
from course_lib.measure.work import Event
from course_lib.specs import ModelSpec, Recipe, Strategy

STAGES = {
    "ddp": Ddp,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "fsdp": Fsdp,
    "hsdp": Fsdp,
}


def predicted_peak(
    events: Sequence[Event],
    model: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    **tuning,
) -> Peak:
    """The peak of one step, in the implementations of this course; `tuning` are fields of Tuning.

    `events` are those of one micro-batch of the same model. Parameters with a 'gradient' among
    them are trained. Under ddp to zero3 what is reduced is in the dtype of gradients; there is one
    group of parameters.

    fsdp and hsdp compute in the dtype in which parameters are gathered (see comm.step), so their
    events are those of a model in that dtype. A checkpoint inside of units, or around them, is
    recorded as it is: give `units` by the names that they have in that model.
    """
    rank = STAGES[strategy.name](events, model, recipe, strategy, Tuning(**tuning))
    for micro_batch in range(recipe.grad_accum):
        rank.begins(last=micro_batch == recipe.grad_accum - 1)
        for event in events:
            rank.see(event.most, f"{event.kind} {event.name}".strip())
            rank.on(event)
    rank.step()
    return rank.peak
