"""Jobs on fake tensors: the bytes of real ones; fewer layers tell of more; AdamW's temporaries."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from course_lib import ledger
from course_lib.errors import CourseError
from course_lib.measure import LiveBytes
from course_lib.measure.fake_run import fake_peak, most
from course_lib.measure.one_of_many import one_of_many
from course_lib.specs import Recipe, Strategy, read_config

CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 61,
}
SPEC = read_config(CONFIG)
JOBS = {
    "each block": (Recipe("fsdp-bf16", seq_len=12), Strategy("fsdp", gpus=8)),
    "one unit, checkpoints": (
        Recipe("pure-bf16", seq_len=12, checkpointing="full"),
        Strategy("fsdp", gpus=64, wrap="model"),
    ),
    "replicas": (
        Recipe("fp32", "sgd-momentum", seq_len=5),
        Strategy("hsdp", gpus=8, gpus_per_node=4, wrap="2000-params"),
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_fake_tensors_live_as_real_ones(job):
    fake, real = (fake_peak(SPEC, *JOBS[job], real=real) for real in (False, True))
    assert fake.peak == real.peak
    assert most(fake.first_step) == most(real.first_step)
    states = ledger.model_states(SPEC, *JOBS[job]).by_category()
    assert fake.steady == real.steady == {k: v for k, v in states.items() if k != "gradients"}


@pytest.mark.parametrize("job", ["each block", "one unit, checkpoints"])
def test_few_layers_tell_of_more(job):
    spec = replace(SPEC, num_layers=6)
    six = fake_peak(spec, *JOBS[job], real=True)  # of which it runs faster
    few = fake_peak(spec, *JOBS[job], real=True, layers=(3, 4))
    assert (few.peak, few.steady) == (six.peak, six.steady)
    assert most(few.first_step) == most(six.first_step)


def test_refuses_what_it_does_not_run():
    recipe, fsdp = Recipe("fsdp-bf16"), Strategy("fsdp", gpus=8)
    for job, says in (
        ((recipe, Strategy("ddp", gpus=8)), "ddp"),
        ((Recipe("zero-bf16"), fsdp), "zero-bf16"),
        ((Recipe("fp32", checkpointing="selective"), fsdp), "selective"),
        ((Recipe("fp32", trainable=0.5), fsdp), "50%"),
        ((recipe, Strategy("fsdp", gpus=8, reshard_after_forward=2)), "subgroups"),
    ):
        with pytest.raises(CourseError, match=says):
            fake_peak(SPEC, *job)
    with pytest.raises(CourseError, match="smaller"):
        fake_peak(SPEC, recipe, fsdp, layers=(6, 6))


# What AdamW makes in its update, besides states, and who counts it. (A few scalars come on top.)

SIZES = [1000, 3000, 2000]
SCALARS = 64


def temporaries(way: str, sizes: list[int]) -> int:
    """Elements that AdamW has at once besides its states, in a step after the first.

    foreach makes one of all tensors. Tensor by tensor, it is two of the present one, and the one of
    the tensor before, which a variable still holds. Fused it makes none.
    """
    if way == "foreach":
        return sum(sizes)
    before = [0, *sizes]
    return 0 if way == "fused" else max(a + 2 * b for a, b in zip(before, sizes, strict=False))


@pytest.mark.parametrize("way", ["foreach", "each", "fused"])
@pytest.mark.parametrize("sizes", [SIZES, [1000] * 7 + [5000]], ids=["three", "eight"])
def test_temporaries_of_adamw(way, sizes):
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    optimizer = torch.optim.AdamW(model, **ways(way))
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with LiveBytes(model, optimizer) as live:
        optimizer.step()
    predicted = 4 * temporaries(way, sizes)
    assert live.peak.total - live.timeline[0].total == predicted
    assert predicted <= allocated(optimizer.step) <= predicted + SCALARS


def test_a_tracker_takes_the_sizes_that_dtensor_computes_for_tensors():
    """Before a foreach operator runs on DTensors for the first time, DTensor runs it on fake
    tensors of whole size, which a tracker cannot tell from those of a fake run. The longest
    operator takes three lists: three times all parameters, on however many ranks."""
    ranks = 16
    local, whole, fake = updates(FakeTensorMode, ranks, width=40, measure=tracked)
    assert fake[0] == pytest.approx(3 * whole + 3 * local, abs=SCALARS)  # states, one temporary
    assert fake[1] == pytest.approx(local, abs=SCALARS)  # it was remembered

    local, whole, true = updates(contextlib.nullcontext, ranks, width=56, measure=profiled)
    assert true[0] == pytest.approx(3 * local, abs=SCALARS)
    assert true[1] == pytest.approx(local, abs=SCALARS)

    local, whole, seen = updates(contextlib.nullcontext, ranks, width=72, measure=tracked)
    assert seen[0] == pytest.approx(3 * local, abs=SCALARS)  # with real tensors it can tell


def updates(mode, ranks: int, width: int, measure) -> tuple[int, int, list[int]]:
    """Bytes of rank 0's parameters, of all, and what `measure` has in two updates by foreach.

    DTensor remembers shapes: `width` is another in each call.
    """
    found = []
    with one_of_many(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with mode():
            model = nn.Sequential(nn.Linear(width, 64, bias=False), nn.Linear(64, 32, bias=False))
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            for _ in range(2):
                model(torch.zeros(2, width)).sum().backward()
                found.append(measure(model, optimizer))
                optimizer.zero_grad()
            whole = sum(4 * p.numel() for p in model.parameters())
            return sum(p.to_local().nbytes for p in model.parameters()), whole, found


def tracked(model, optimizer) -> int:
    """PyTorch's MemTracker."""
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    (before,) = tracker.get_tracker_snapshot("current").values()
    with tracker:
        optimizer.step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"] - before["Total"]


def profiled(model, optimizer) -> int:
    return allocated(optimizer.step)


def allocated(function) -> int:
    """The most that the allocator gave at once during a call, by PyTorch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most_at_once = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        now += nbytes
        most_at_once = max(most_at_once, now)
    return most_at_once


def ways(way: str) -> dict:
    return {"fused": True} if way == "fused" else {"foreach": way == "foreach"}
