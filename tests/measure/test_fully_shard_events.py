"""The events of PyTorch's fully_shard: those of our FSDP, and recording them changes nothing."""

import pytest
import torch
from torch import nn

from course_lib import ranks
from course_lib.errors import CourseError
from course_lib.measure import fully_shard_events
from course_lib.measure.fully_shard_events import recording_fully_shard
from course_lib.sharded.fsdp_events import COMMUNICATION

WIDTH, BLOCKS, RANKS = 6, 2, 4
TORCH = {  # name: options of fully_shard, shape of the mesh, what is done before the recording
    "plain": ({}, (4,), None),
    "kept": ({"reshard_after_forward": False}, (4,), None),
    "near": ({"reshard_after_forward": 2}, (4,), None),
    "hybrid": ({}, (2, 2), None),
    "async": ({}, (4,), lambda model: model._set_unshard_async_op(True)),
    "no sync": ({}, (4,), lambda model: model.set_requires_gradient_sync(False)),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).relu()
        return x * 2


def train_all():
    """{name: (events, the log of collectives, gradients as without a recording?)}"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from course_lib.sharded.fsdp import FSDP

    torch.set_num_threads(1)
    x, results = torch.ones(3, WIDTH), {}

    def step(model):
        model(x).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [g.to_local() if hasattr(g, "to_local") else g for g in grads]

    def mesh_of(shape):
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])

    for name, (options, shape, prepare) in TORCH.items():
        model = Model()
        mesh = mesh_of(shape)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh)
        expected = step(model)
        if prepare:
            prepare(model)
        before = len(ranks.entries())
        with recording_fully_shard(model) as events:
            got = step(model)
        log = [e.kind for e in ranks.entries()[before:]]
        same = all(map(torch.equal, got, expected)) and len(got) == len(expected)
        state = model._get_fsdp_state()
        wrapped = [vars(state).get("_pre_backward"), vars(state._fsdp_param_group).get("reshard")]
        if wrapped != [None, None] or len(step(model)) != len(got):
            raise RuntimeError("what was wrapped is not as before")
        results[name] = list(events), log, same

    for name in ("plain", "kept", "near", "hybrid"):
        options, shape, _ = TORCH[name]
        model = Model()
        fsdp = FSDP(model, list(model.blocks), mesh=mesh_of(shape), **options)
        step(model)
        with fsdp.recording() as events:
            step(model)
        results[f"our {name}"] = list(events), None, None

    fully_shard_events.GROUP += ("gone",)
    try:
        with recording_fully_shard(model := fully_shard(Model())):
            pass
    except CourseError as error:
        results["error"] = str(error)
    results["all_reduce"] = torch.distributed.all_reduce.__module__
    return results


@pytest.fixture(scope="module")
def results():
    return ranks.run(train_all, world_size=RANKS)


def communication(events):
    return [(e.kind, e.unit, e.bytes) for e in events if e.kind in COMMUNICATION]


@pytest.mark.parametrize("name", ["plain", "kept", "near", "hybrid"])
def test_collectives_are_those_of_ours_in_kind_order_and_bytes(results, name):
    for of_rank in results:
        assert communication(of_rank[name][0]) == communication(of_rank[f"our {name}"][0])


@pytest.mark.parametrize("name", TORCH)
def test_every_collective_is_recorded_and_gradients_are_as_ever(results, name):
    for of_rank in results:
        events, log, same = of_rank[name]
        assert [e.kind for e in events if e.kind in COMMUNICATION] == log
        assert same or name == "no sync"  # which leaves no gradients of shards


def of_unit(events, unit):
    left_out = ("free", "wait", *COMMUNICATION)
    return [e.kind for e in events if e.unit == unit and e.kind not in left_out]


def test_a_units_life_cycle_is_as_ours(results):
    theirs, ours = (results[0][name][0] for name in ("plain", "our plain"))
    for unit in ("", "blocks.0", "blocks.1"):
        assert of_unit(theirs, unit) == of_unit(ours, unit)
    assert of_unit(theirs, "blocks.0") == [
        *("copy out", "forward", "reshard"),
        *("copy out", "backward", "reshard", "copy in"),
    ]
    root = next(e for e in theirs if e.kind == "forward" and e.unit == "")
    inside = [e for e in theirs if e.kind == "forward" and e is not root]
    assert len(inside) == BLOCKS
    assert all(root.start < e.start and e.end < root.end for e in inside)


def test_states_and_bytes_held(results):
    whole = 4 * (WIDTH * WIDTH + WIDTH)
    padded = 4 * (8 * WIDTH + 8)  # rows of 6 on 4 ranks: 2 each
    events = [e for e in results[0]["plain"][0] if e.unit == "blocks.0"]
    seen = {e.kind: (e.state, e.held) for e in events}
    assert seen["all_gather"] == ("gathering", padded)
    assert seen["forward"][0] == "whole" and seen["forward"][1] >= padded
    assert seen["copy in"] == ("sharded", padded)
    assert events[-1].held == 0 and events[-1].kind == "free"
    near = [e for e in results[0]["near"][0] if e.unit == "blocks.0" and e.kind == "reshard"]
    assert [e.state for e in near] == ["resharded", "sharded"] and near[0].held >= padded // 2
    aside = [e for e in results[0]["no sync"][0] if e.unit == "blocks.0"]
    assert aside[-1].kind == "reshard" and aside[-1].held == whole  # gradients that wait


def test_what_is_waited_for_at_once_is_exposed(results):
    events = results[0]["plain"][0]
    for e in (e for e in events if e.kind in COMMUNICATION):
        waits = [w for w in events if w.kind == "wait" and w.unit == e.unit]
        assert any(e.start <= w.start and w.end <= e.end for w in waits)
    for of_rank in results:
        assert all(e.end is not None and e.end >= e.start for e in of_rank["async"][0])
        hidden = [e for e in of_rank["async"][0] if e.kind == "all_gather" and e.unit == "blocks.0"]
        waits = [e for e in of_rank["async"][0] if e.kind == "wait" and e.unit == "blocks.0"]
        assert hidden[1].start < waits[1].start  # in backward it was sent for ahead


def test_what_is_not_sharded_or_another_pytorch_is_refused(results):
    with pytest.raises(CourseError, match="call fully_shard on its blocks"):
        recording_fully_shard(nn.Linear(2, 2)).__enter__()
    assert "has no FSDPParamGroup.gone" in results[0]["error"]
    assert "it knows PyTorch 2.13" in results[0]["error"]
    assert results[0]["all_reduce"].startswith("torch.")
