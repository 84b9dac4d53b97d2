"""FSDP's events, its shapes of ranks, what it makes of the meta device, and its errors."""

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import BF16, Case, Tower, frozen, outside, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero_cases import (
    close,
    one_thread,  # noqa: F401 (a fixture)
    whole_state,
)

from course_lib import ranks
from course_lib.errors import CourseError
from course_lib.sharded.fsdp import FSDP
from course_lib.sharded.fsdp_events import COMMUNICATION
from course_lib.sharded.norm import global_norm

# Events.


def nested(tower: nn.Module) -> list[nn.Module]:
    return [m for block in tower.blocks for m in (block, block.up)]


RECORDED = {
    "freed": Case(),
    "kept": Case(options={"reshard_after_forward": False, "forward_prefetch": 2}),
    "to a neighbour": Case(options={"reshard_after_forward": 1, "backward_prefetch": 0}),
    "units in units": Case(wrap=nested),
    "checkpointed": Case(lambda: Tower(outside(True)), options={"recompute_reshards": True}),
    "no gradient leads to": Case(frozen("stem", "blocks.0.down")),
    "16 bits, offload": Case(options={"precision": BF16, "offload": True}, wrap=nested),
    "replicas": Case(shape=(2, 1)),
    "no sync": Case(no_sync=True),
}
MOVES = {
    "sharded": {"gathering"},
    "gathering": {"whole", "sharded"},
    "whole": {"sharded", "resharded"},
    "resharded": {"gathering", "sharded"},
}


def test_recordings_tell_the_life_cycle():
    def fn():
        torch.set_num_threads(1)
        recordings = {}
        for name, case in RECORDED.items():
            model, fsdp = sharded(case)
            fsdp.synchronizing = not case.no_sync
            for n in range(2):
                before = len(ranks.entries())
                with fsdp.recording() as events:
                    model(n, dist.get_rank(), 0).backward()
            left = {unit.name: unit.held for unit in fsdp.units}
            issued = [(e.kind, e.payload) for e in ranks.entries()[before:]]
            recordings[name] = list(events), left, issued
        return recordings

    for recordings in ranks.run(fn, world_size=2):
        for name, (events, left, issued) in recordings.items():
            moved = [(e.kind, e.bytes) for e in events if e.kind in COMMUNICATION]
            assert moved == issued, name
            assert all(e.end is not None and e.start <= e.end for e in events), name
            check_nesting([e for e in events if e.kind not in COMMUNICATION])
            for unit in left:
                own = [e for e in events if e.unit == unit]
                states = [e.state for e in own if e.kind not in ("forward", "backward")]
                for a, b in zip(["sharded", *states], states, strict=False):
                    assert a == b or b in MOVES[a], (name, unit, a, b)
                assert own[-1].state == "sharded" and states[-1] == "sharded"
                assert {"gathering", "whole"} <= set(states), (name, unit)
                copied = [e for e in own if e.kind == "copy out"]
                assert all(e.held == e.bytes for e in copied if not left[unit]), name
                if name != "no sync":
                    assert left[unit] == own[-1].held == 0, (name, unit)
        assert sum(recordings["no sync"][1].values()) == 4 * sum(
            p.numel() for p in Tower().parameters()
        )
        states = {e.state for e in recordings["to a neighbour"][0]}
        assert "resharded" in states


def check_nesting(spans: list) -> None:
    """Each ends before that ends in which it began."""
    around = []
    for event in spans:
        while around and around[-1].end <= event.start:
            around.pop()
        assert not around or event.end <= around[-1].end, (around[-1], event)
        around.append(event)


def test_no_more_gathers_are_under_way_than_may_be():
    """What may be ahead, and how many may be under way, and how many then are at most."""
    limits = [(0, 9, 1), (1, 2, 1), (3, 9, 3), (3, 2, 2), (3, 1, 1)]

    def fn():
        torch.set_num_threads(1)
        most = []
        for ahead, limit, _ in limits:
            options = {"forward_prefetch": ahead, "backward_prefetch": ahead, "gathers": limit}
            model, fsdp = sharded(Case(lambda: Tower(deep=5), options=options))
            for n in range(2):
                with fsdp.recording() as events:
                    model(n, 0, 0).backward()
            under_way, counts = set(), [0]
            for e in events:
                if e.kind == "all_gather":
                    under_way.add(e.unit)
                elif e.kind in ("copy out", "reshard"):
                    under_way.discard(e.unit)
                counts.append(len(under_way))
            most.append(max(counts))
        return most

    for most in ranks.run(fn, world_size=2):
        assert most == [expected for *_, expected in limits]


def test_what_a_checkpoint_costs_depends_on_where_it_is():
    """checkpoint(unit): 3 gathers of each block as FSDP1 goes about it, 2 as FSDP2 does."""

    def fn():
        torch.set_num_threads(1)
        counts = []
        for options in ({"recompute_reshards": True}, {}):
            model, fsdp = sharded(Case(lambda: Tower(outside(True)), options=options))
            with fsdp.recording() as events:
                model(0, 0, 0).backward()
            counts.append(Counter(e.unit for e in events if e.kind == "all_gather"))
        return counts

    for three, two in ranks.run(fn, world_size=2):
        assert three == {"": 1, "blocks.0": 3, "blocks.1": 3, "blocks.2": 3}
        assert two == {"": 1, "blocks.0": 2, "blocks.1": 2, "blocks.2": 2}


# Shapes of ranks.


def test_18_rows_on_8_ranks_are_six_shards_of_3_and_two_that_are_empty():
    def fn():
        torch.set_num_threads(1)
        model = nn.Linear(4, 18)
        fsdp = FSDP(model)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.ones(1, 4)
        model(x).square().sum().backward()
        norm = fsdp.clip_grad_norm_(1.0)
        optimizer.step()
        return len(model.weight), len(model.bias), len(model.weight.grad), norm

    results = ranks.run(fn, world_size=8)
    assert [rows for rows, *_ in results] == [3, 3, 3, 3, 3, 3, 0, 0]
    assert all(rows == bias == grad for rows, bias, grad, _ in results)
    assert len({norm for *_, norm in results}) == 1


def test_replicas_count_once_in_the_norm():
    """Over all ranks it would be too large by the square root of their number."""

    def fn():
        torch.set_num_threads(1)
        model, fsdp = sharded(Case(shape=(2, 1)))
        model(0, dist.get_rank(), 0).backward()
        gradients = [p.grad for p in model.parameters()]
        return global_norm(*gradients), fsdp.clip_grad_norm_(1e-3), global_norm(*gradients)

    alone = Case().model()
    for rank in range(2):
        (alone(0, rank, 0) / 2).backward()
    right = float(nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    for over_all, norm, clipped in ranks.run(fn, world_size=2):
        assert norm == pytest.approx(right)
        assert over_all == pytest.approx(right * 2**0.5)
        assert clipped == pytest.approx(1e-3 * 2**0.5, rel=1e-3)


# The meta device.


class Counting(nn.Module):
    """Has a buffer, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def reset_parameters(self) -> None:
        self.seen.fill_(7.0)


def test_a_model_of_the_meta_device_is_rank_0s():
    def build():
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), Counting(), nn.Linear(3, 5))
        model[3].weight = model[0].weight
        return model

    def fn():
        with torch.device("meta"):
            model = build()
        given = []
        torch.manual_seed(dist.get_rank())

        def init(module):
            given.append(type(module).__name__)
            module.reset_parameters()

        fsdp = FSDP(model, [model[1]], init=init)
        return given, whole_state(model, fsdp), len(model[0].weight)

    first, second = ranks.run(fn, world_size=2)
    assert sorted(first[0]) == ["BatchNorm1d", "Counting", "Linear", "Linear"]
    close(second[1], first[1], "whole", 0)
    assert first[1]["0.weight"].abs().max() > 0.1
    assert torch.equal(first[1]["0.weight"], first[1]["3.weight"])
    assert torch.equal(first[1]["1.weight"], torch.ones(5))
    assert torch.equal(first[1]["1.running_var"], torch.ones(5))
    assert torch.equal(first[1]["2.seen"], torch.full((2,), 7.0))
    assert (first[2], second[2]) == (3, 2)


# Errors.


def no_dimension():
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    FSDP(module)


def two_dtypes():
    FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))


def halved():
    model, _ = sharded(Case())
    model.half()
    model(0, 0, 0)


def replaced():
    model, _ = sharded(Case())
    model.blocks[1].up.bias = nn.Parameter(torch.zeros(7))
    model(0, 0, 0)


def frozen_later():
    model, _ = sharded(Case())
    model.stem.requires_grad_(False)
    model(0, 0, 0)


def without_reset():
    with torch.device("meta"):
        module = nn.MultiheadAttention(4, 2)
    FSDP(module)


ERRORS = [
    (no_dimension, "'scale' has no dimension: give it the shape"),
    (two_dtypes, "has parameters of torch.float32, torch.float64"),
    (halved, "has been replaced, and FSDP would go on"),
    (replaced, "The parameter 'bias' of the unit 'blocks.1' has been replaced"),
    (frozen_later, "had requires_grad True when FSDP was made"),
    (without_reset, "to fill a .* from the meta device"),
    (lambda: FSDP(Tower(), [nn.Linear(1, 1)]), "given a Linear as a unit"),
    (lambda: FSDP(Tower(), mesh=(2, 1)), r"given a mesh \(2, 1\), and expects a DeviceMesh"),
    (
        lambda: FSDP(Tower(), mesh=init_device_mesh("cpu", (1, 2, 1))),
        r"a mesh of shape \(1, 2, 1\), and expects a DeviceMesh of all 2 ranks",
    ),
    (lambda: FSDP(Tower(), reshard_after_forward=3), "3, and parameters are sharded among 2 ranks"),
    (lambda: FSDP(Tower(), reshard_after_forward=0), "reshard_after_forward"),
    (lambda: FSDP(Tower(), backward_prefetch=-1), "backward_prefetch"),
    (lambda: FSDP(Tower(), gathers=0), "gathers"),
]


def test_errors_say_what_to_do():
    def fn():
        told = []
        for raises, _ in ERRORS:
            try:
                raises()
            except CourseError as error:
                told.append(str(error))
            else:
                told.append("nothing")
        return told

    for told, (_, message) in zip(ranks.run(fn, world_size=2)[0], ERRORS, strict=True):
        assert re.search(message, told), told
