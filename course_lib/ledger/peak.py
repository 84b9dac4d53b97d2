"""The peak of a step, predicted: the ledger's resident bytes, one micro-batch's work, and buffers.

A stage changes what a rank holds, not what it computes. So the events of one micro-batch, measured
in one process (see `work`), are replayed here under the rules of a stage: what is resident, which
gradients are kept, moved or freed, which buffers are there meanwhile, and what the update needs.
The peak is the most that ever comes together.

As in the ledger, the rank is the one that holds most, and the step is not the first.
"""

from collections.abc import Sequence

from course_lib.comm.units import HEAD, ROOT, plain, units
from course_lib.errors import CourseError
from course_lib.ledger.execution import CUDA, Execution
from course_lib.ledger.replay import Ddp, Peak, Rank, Zero1, Zero2
from course_lib.ledger.replay_fsdp import Fsdp
from course_lib.ledger.replay_zero3 import Zero3
from course_lib.ledger.tuning import Tuning
from course_lib.ledger.work import Event, work
from course_lib.specs import ModelSpec, Recipe, Strategy
from course_lib.specs.recipe import PARAMETERS

STAGES = {
    "ddp": Ddp,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "fsdp": Fsdp,
    "hsdp": Fsdp,
}


def peak(
    model: ModelSpec, recipe: Recipe, strategy: Strategy, execution: Execution = CUDA, **tuning
) -> Peak:
    """The peak of one step, from arithmetic alone; `tuning` are fields of Tuning.

    Errors: CourseError for a bare count, of whose activations nothing is known.
    """
    return _replayed(*_job(model, recipe, strategy, execution, tuning)).peak


def timeline(
    model: ModelSpec, recipe: Recipe, strategy: Strategy, execution: Execution = CUDA, **tuning
) -> list[Peak]:
    """What is there at most up to each event of a step, in order; the largest is the `peak`."""
    return _replayed(*_job(model, recipe, strategy, execution, tuning), moments=[]).moments


def _job(model, recipe, strategy, execution, tuning) -> tuple:
    """What `_replayed` takes."""
    if model.is_bare:
        raise CourseError(
            f"{model.name} is a bare count of parameters, so nothing is known of its activations: "
            "give a model with sizes, by its name or its config.json."
        )
    on_cpu = execution.device == "cpu"
    given = {
        "trained": recipe.trainable,
        "copies": on_cpu,
        "update": execution.update or ("one by one" if on_cpu else "foreach"),
    } | tuning
    if given.get("units") is not None:
        given["units"] = {plain(name) for name in given["units"]}
    modules = {ROOT}
    if PARAMETERS in strategy.sharded:
        modules |= {unit.name for unit in units(model, strategy, given.get("units"))} | {HEAD}
    return work(model, recipe, execution, modules), model, recipe, strategy, Tuning(**given)


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
    return _replayed(events, model, recipe, strategy, Tuning(**tuning)).peak


def _replayed(events, model, recipe, strategy, tuning: Tuning, moments=None) -> Rank:
    """A rank after one step; `moments` fills, if it is a list."""
    rank = STAGES[strategy.name](events, model, recipe, strategy, tuning)
    rank.moments = moments
    for micro_batch in range(recipe.grad_accum):
        rank.begins(last=micro_batch == recipe.grad_accum - 1)
        for event in events:
            rank.run(event)
    rank.finish()
    return rank
