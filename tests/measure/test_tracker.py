"""LiveBytes against what is known by hand, against model_state_bytes, and against MemTracker."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from course_lib import ledger, models, specs
from course_lib.comm.units import units
from course_lib.measure import LiveBytes, model_state_bytes, work
from course_lib.measure.one_of_many import one_of_many
from course_lib.sharded.fsdp import FSDP
from course_lib.specs import Recipe, Strategy

SPEC = replace(specs.model("lab-25m"), num_layers=2, vocab_size=1000)
TOKENS = torch.randint(1000, (2, 33), generator=torch.Generator().manual_seed(0))


def job(optimizer_class=torch.optim.AdamW, **options):
    model = models.build(SPEC)
    return model, optimizer_class(model.parameters(), lr=1e-3, foreach=False, **options)


def step(model, optimizer) -> None:
    model.loss(TOKENS).backward()
    optimizer.step()


def test_after_a_step_the_model_states_are_those_that_are_counted_at_rest():
    model, optimizer = job()
    with LiveBytes(model, optimizer) as live:
        step(model, optimizer)
    held = model_state_bytes(model, optimizer)
    assert {name: live.now[name] for name in held} == held


def test_what_an_optimizer_lists_as_its_own_is_found_there():
    class Stage:
        parameter, gradient, state = (torch.ones(n) for n in (3, 5, 7))

        def parameter_tensors(self):
            return [self.parameter]

        def gradient_tensors(self):
            return [self.gradient]

        def state_tensors(self):
            return [self.state]

    with LiveBytes(nn.Linear(1, 1, bias=False), Stage()) as live:
        pass
    assert live.now == {"parameters": 4 * (1 + 3), "gradients": 4 * 5, "optimizer_states": 4 * 7}


def test_the_peak_is_that_of_pytorchs_tracker():
    model, optimizer = job()
    step(model, optimizer)  # from the second on, the optimizer's states are there
    optimizer.zero_grad()
    with LiveBytes(model, optimizer) as live:
        step(model, optimizer)
    optimizer.zero_grad()
    theirs = MemTracker()
    theirs.track_external(model, optimizer)
    with theirs:
        step(model, optimizer)
    (peak,) = theirs.get_tracker_snapshot("peak").values()
    assert live.peak.total == peak["Total"]
    assert live.peak.live["parameters"] == next(v for k, v in peak.items() if "PARAM" in str(k))


def test_a_forward_keeps_what_backward_needs_and_backward_frees_it():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    inputs = torch.ones(2, 8)
    with LiveBytes(model) as live:
        loss = model(inputs).sum()
        kept = live.now["activations"]
        loss.backward()
    # Kept: the inputs [2, 8], tanh's output [2, 16], and the loss; freed: [2, 16], [2, 4].
    assert kept == 4 * (2 * 8 + 2 * 16 + 1)
    assert live.now["activations"] == 4 * (2 * 8 + 1)
    assert live.now["gradients"] == 4 * (8 * 16 + 16 * 4)


def test_a_label_names_what_is_made_under_it():
    model = nn.Linear(4, 4, bias=False)
    with LiveBytes(model) as live:
        with torch.profiler.record_function("gather_buffers"):
            buffer = torch.empty(1000)
        with torch.profiler.record_function("something of the learner's"):
            other = torch.empty(500)
    assert live.now == {
        "parameters": 64,
        "gather_buffers": buffer.nbytes,
        "other": other.nbytes,
    }


def test_what_is_freed_and_what_is_resized_is_seen():
    model = nn.Linear(4, 4, bias=False)
    with LiveBytes(model) as live:
        first, second = torch.empty(1000), torch.empty(100)
        assert live.timeline[-1].live["activations"] == 4400
        del first
        second.untyped_storage().resize_(0)
        assert "activations" not in live.now


def test_views_and_tied_weights_count_once():
    model = models.build(replace(SPEC, tied_embeddings=True))
    with LiveBytes(model) as live:
        views = [torch.ones(10).view(2, 5)[0], *torch.ones(20).chunk(4)]
    assert live.now["parameters"] == 4 * replace(SPEC, tied_embeddings=True).parameters
    assert live.now["activations"] == 4 * 30 and len(views) == 5


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_gone_only_where_they_are_set_to_none(set_to_none):
    model, optimizer = job(torch.optim.SGD)
    with LiveBytes(model, optimizer) as live:
        step(model, optimizer)
        optimizer.zero_grad(set_to_none=set_to_none)
    assert bool(live.now.get("gradients")) is not set_to_none


def resident(live) -> dict[str, int]:
    return {name: live.now.get(name, 0) for name in specs.MODEL_STATES}


def test_fully_shard_and_fsdp_hold_what_the_ledger_says():
    """Of a DTensor the local tensor counts, of FSDP the shards; whole ones are gone by then."""
    predicted = ledger.model_states(SPEC, Recipe("fp32"), Strategy("fsdp", 4)).by_category()
    with one_of_many(4):
        theirs, ours = models.build(SPEC), models.build(SPEC)
        for block in theirs.model.layers:
            fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
        fully_shard(theirs, mesh=init_device_mesh("cpu", (4,)))
        FSDP(ours)
        for model in (theirs, ours):
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            with LiveBytes(model, optimizer) as live:
                assert live.now == {"parameters": predicted["parameters"]}
                step(model, optimizer)
            assert resident(live) == predicted
            most = max(moment.live["parameters"] for moment in live.timeline)
            assert most > 2 * predicted["parameters"]  # it has seen whole ones, too


def test_under_fsdp_each_is_counted_as_what_it_is():
    with one_of_many(4):
        model = models.build(SPEC)
        FSDP(model)
        with LiveBytes(model) as live:
            model.loss(TOKENS).backward()
    shards = ledger.model_states(SPEC, Recipe("fp32"), Strategy("fsdp", 4)).parameters
    whole = max(moment.live["parameters"] for moment in live.timeline)
    most = {
        name: max(moment.live.get(name, 0) for moment in live.timeline)
        for name in ("gather_buffers", "reduce_buffers", "gradients", "other")
    }
    root, block, *_ = (4 * 4 * unit.shard for unit in units(SPEC, Strategy("fsdp", 4)))
    assert whole == shards + root + block
    assert most["gather_buffers"] == max(root, block)
    assert most["reduce_buffers"] == max(root, block) * 5 // 4
    assert most["gradients"] >= 4 * SPEC.vocab_size * SPEC.hidden_size


def test_a_gradient_that_is_taken_is_gone_for_what_follows():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    events = work(model, lambda: model(torch.ones(1, 100)).sum())
    assert [event.name for event in events if event.kind == "gradient"] == ["1.weight", "0.weight"]
    assert max(event.most for event in events) < 2 * 40_000  # never both
    assert [event.most >= 40_000 for event in events if event.kind == "gradient"] == [True, True]


def test_a_checkpointed_module_is_entered_again():
    model = models.build(SPEC)
    plain = work(model, lambda: model.loss(TOKENS))
    for block in model.model.layers:
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
    again = work(model, lambda: model.loss(TOKENS))
    entered = [
        [x.name for x in events if x.kind == "enter"].count("model.layers.0.mlp")
        for events in (plain, again)
    ]
    assert entered == [1, 2]
    assert [x.name for x in again if x.kind == "gradient"] == [
        x.name for x in plain if x.kind == "gradient"
    ]
    assert max(x.most for x in again) < max(x.most for x in plain)
