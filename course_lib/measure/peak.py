"""The peak of a step, predicted: the ledger's resident bytes, one micro-batch's work, and buffers.

A stage changes what a rank holds, not what it computes. So the events of one micro-batch, measured
in one process (see `work`), are replayed here under the rules of a stage: what is resident, which
gradients are kept, moved or freed, which buffers are there meanwhile, and what the update needs.
The peak is the most that ever comes together.

As in the ledger, the rank is the one that holds most, and the step is not the first.
"""

from collections.abc import Sequence

from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.errors import CourseError
from course_lib.measure.replay import Ddp, Peak, Zero1, Zero2
from course_lib.measure.replay_zero3 import Zero3
from course_lib.measure.work import Event
from course_lib.specs import ModelSpec, Recipe, Strategy

STAGES = {"ddp": Ddp, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


def predicted_peak(
    events: Sequence[Event],
    model: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch: int = 1,
) -> Peak:
    """The peak of one step of ddp, zero1, zero2 or zero3, in the implementations of this course.

    `events` are those of one micro-batch of the same model. Parameters with a 'gradient' among
    them are trained. Reduced is in the dtype of gradients; there is one group of parameters.
    """
    if strategy.name not in STAGES:
        raise CourseError(
            f"The peak was asked of {strategy.name}, and is predicted for {', '.join(STAGES)}: "
            "give one of these."
        )
    rank = STAGES[strategy.name](events, model, recipe, strategy, bucket_bytes, prefetch)
    for _ in range(recipe.grad_accum):
        for event in events:
            rank.see(event.most, f"{event.kind} {event.name}".strip())
            rank.on(event)
    rank.step()
    return rank.peak
