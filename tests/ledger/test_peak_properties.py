"""What must hold for the peak of every job, whatever its numbers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import ledger, specs
from course_lib.errors import CourseError
from course_lib.ledger.advice import best_change
from course_lib.ledger.work import work

# No times are tested, and no run differs from the last.
settings.register_profile("peak", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("peak")

NAMES = [name for name in specs.models() if not specs.model(name).is_bare]


@st.composite
def models(draw) -> specs.ModelSpec:
    """A preset with as few, or as many layers, and a vocabulary of any size."""
    model = specs.model(draw(st.sampled_from(NAMES)))
    if model.num_experts:
        model = replace(model, num_experts=2)
    vocabulary = draw(st.integers(2, 200_000))
    return replace(model, num_layers=draw(st.integers(1, 6)), vocab_size=vocabulary)


recipes = st.builds(
    specs.Recipe,
    precision=st.sampled_from(list(specs.PRECISIONS)),
    optimizer=st.sampled_from(list(specs.OPTIMIZERS)),
    micro_batch=st.integers(1, 5),
    seq_len=st.integers(1, 5000),
    grad_accum=st.integers(1, 3),
    checkpointing=st.sampled_from(specs.CHECKPOINTING),
    trainable=st.sampled_from([0.0, 0.3, 1.0]),
)
executions = st.builds(
    ledger.Execution,
    attention=st.sampled_from(["flash", "explicit"]),
    norm=st.sampled_from(["fused", "unfused"]),
    activation=st.sampled_from(["fused", "unfused"]),
    loss_chunks=st.integers(1, 4),
    dropout=st.booleans(),
    device=st.sampled_from(["cuda", "cpu"]),
    sums_in_place=st.booleans(),
    keeps_logits=st.booleans(),
)


@st.composite
def strategies(draw, names=tuple(specs.SHARDED)) -> specs.Strategy:
    name = draw(st.sampled_from(names))
    gpus = draw(st.integers(1, 1024))
    sharded = name in ("zero3", "fsdp", "hsdp")
    return specs.Strategy(
        name,
        gpus * 8 if name == "hsdp" else gpus,
        wrap=draw(st.sampled_from(["layer", "model", "5000000-params"])),
        reshard_after_forward=draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "optimizer", "all"] if sharded else ["none"])),
    )


@given(models(), recipes, strategies(), executions, st.integers(0, 3))
def test_no_job_crashes_and_parts_add_up(model, recipe, strategy, execution, prefetch):
    job = model, recipe, strategy, execution
    try:
        states = ledger.model_states(model, recipe, strategy)
    except CourseError:  # there is nothing to shard, or to offload
        with pytest.raises(CourseError):
            ledger.peak(*job, prefetch=prefetch)
        return
    peak = ledger.peak(*job, prefetch=prefetch)
    assert sum(peak.by_category.values()) == peak.bytes > 0
    assert all(nbytes >= 0 for nbytes in peak.by_category.values())
    assert peak.apart >= peak.bytes
    assert peak.bytes >= states.parameters + states.optimizer_states


@given(models(), recipes, st.sampled_from(["ddp", "zero3", "fsdp"]), st.integers(1, 512))
def test_the_peak_is_the_most_of_the_timeline(model, recipe, name, gpus):
    job = model, recipe, specs.Strategy(name, gpus)
    moments, peak = ledger.timeline(*job), ledger.peak(*job)
    assert max(moment.bytes for moment in moments) == peak.bytes
    assert all(sum(moment.by_category.values()) == moment.bytes for moment in moments)


@given(models(), recipes, executions)
def test_checkpointing_never_keeps_more(model, recipe, execution):
    """What forward leaves to backward, by how much is checkpointed."""
    kept = []
    for checkpointing in specs.CHECKPOINTING:  # none, selective, full
        events = work(model, replace(recipe, checkpointing=checkpointing), execution, {""})
        kept.append(next(x for x in events if x.kind == "loss").live[0])
    assert kept == sorted(kept, reverse=True)


@given(models(), recipes, executions)
def test_nothing_is_left_but_the_loss(model, recipe, execution):
    assert work(model, recipe, execution)[-1].now <= 8 * recipe.micro_batch * recipe.seq_len + 8


@given(models(), recipes, st.integers(1, 64))
def test_advice_lowers_the_peak(model, recipe, gpus):
    job = model, recipe, specs.Strategy("ddp", gpus), ledger.CUDA
    change = best_change(*job)
    assert change is None or change.peak.bytes < 0.98 * ledger.peak(*job).bytes


def test_a_bare_count_has_no_peak():
    with pytest.raises(CourseError, match="paper-7.5b is a bare count"):
        ledger.peak(specs.model("paper-7.5b"), specs.Recipe(), specs.Strategy())
