"""What users do with FSDP that nobody told them to: it goes on as one process would."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import WIDTH, Tower, frozen, in_turn, without_the_second
from torch import nn
from zero_cases import (
    one_thread,  # noqa: F401 (a fixture)
    whole_state,
)

from course_lib import ranks
from course_lib.sharded.fsdp import FSDP
from course_lib.specs.padding import flat_shard


def x_of(rank: int, n: int = 0) -> torch.Tensor:
    return torch.sin(torch.arange(4.0 * WIDTH).view(4, WIDTH) + n + 10 * rank)


class Broken(Exception):
    pass


def broken(*_):
    raise Broken


# Each is called with a model, sharded or not, and a rank whose part of the batch it trains on.


def broken_forward(model, rank):
    handle = model.blocks[1].up.register_forward_hook(broken)
    with pytest.raises(Broken):
        model(0, rank, 0)
    handle.remove()
    model(1, rank, 0).backward()


def broken_backward(model, rank):
    """What it left is gone with what the user sets to zero."""

    def spoil(block, args, output):
        output.register_hook(broken)

    parameters = list(model.parameters())  # as an optimizer has them
    kept = copy.deepcopy([p.grad for p in parameters])  # other ranks', in one process
    handle = model.blocks[1].register_forward_hook(spoil)
    with pytest.raises(Broken):
        model(0, rank, 0).backward()
    handle.remove()
    for p, grad in zip(parameters, kept, strict=True):
        p.grad = grad
    model(1, rank, 0).backward()


def backward_twice(model, rank):
    loss = model(0, rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def evaluated_before_backward(model, rank):
    loss = model(0, rank, 0)
    with torch.no_grad():
        model(1, rank, 0)
    loss.backward()


def two_forwards(model, rank):
    """Of which the second does without a block, whose inputs need no gradient."""
    first = model(0, rank, 0)
    model.call = lambda tower, x: tower.blocks[2](x)
    (first + model(1, rank, 0)).backward()
    model.call = in_turn


def without_one_in_between(model, rank):
    """So that what is guessed is wrong."""
    for call in (in_turn, without_the_second, in_turn):
        model.call = call
        model(0, rank, 0).backward()


def in_two_calls(model, rank):
    """Of a unit by itself, and then of the model."""
    model.blocks[0](x_of(rank)).sum().backward()
    model(0, rank, 0).backward()


def on_its_parts(model, rank):
    model(x_of(rank)).backward()


class Noting(nn.Module):
    """Blocks that leave a loss of their own in a list which they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, noted=noted).hidden
        return x.square().sum() + sum(noted)


@dataclass
class Output:
    hidden: torch.Tensor


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, noted: list) -> Output:
        x = torch.tanh(self.linear(x))
        noted.append(x.mean())
        return Output(x)


class Recurrent(nn.Module):
    """A module that keeps a list of its parameters, and one whose children are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, 6), nn.MultiheadAttention(6, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.blocks[0](x)
        return self.blocks[1](x, x, x)[0].square().sum()


class OnOddRanks(nn.Module):
    """A parameter that even ranks do not use, in a unit that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.blocks[0].scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks[0].forward = self.scaled

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[0]
        y = nn.functional.linear(x, block.weight, block.bias)
        return y * block.scale if x[0, 0] != 0 else y  # of rank 0 it is 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x).square().sum()


HABITS: dict[str, tuple[Callable, Callable]] = {
    "an error in forward": (Tower, broken_forward),
    "an error in backward": (Tower, broken_backward),
    "backward twice": (Tower, backward_twice),
    "an evaluation in between": (Tower, evaluated_before_backward),
    "two forwards": (Tower, two_forwards),
    "two forwards, frozen stem": (frozen("stem"), two_forwards),
    "wrong guesses": (Tower, without_one_in_between),
    "a unit by itself": (Tower, in_two_calls),
    "a list that is filled": (Noting, on_its_parts),
    "an LSTM, attention": (Recurrent, on_its_parts),
    "on odd ranks": (OnOddRanks, on_its_parts),
}


def difference(build: Callable, habit: Callable) -> float:
    """The largest between gradients: this rank's shards, and rows of the mean in one process."""
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    alone = build()
    fsdp = FSDP(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    habit(model, rank)
    for each in range(world_size):
        habit(alone, each)
    assert {unit.state for unit in fsdp.units} == {"sharded"}
    assert sum(unit.held for unit in fsdp.units) == 0
    worst = 0.0
    for p, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (whole.grad is None)
        if p.grad is not None:
            rows = flat_shard(len(whole), world_size)
            mine = whole.grad[rank * rows : (rank + 1) * rows] / world_size
            worst = max([worst, *(p.grad - mine).abs().flatten().tolist()])
    return worst


def test_habits_do_no_harm():
    def fn():
        torch.set_num_threads(1)
        return {name: difference(*habit) for name, habit in HABITS.items()}

    for differences in ranks.run(fn, world_size=2):
        for name, worst in differences.items():
            assert worst < 1e-6, (name, worst)


def test_between_steps():
    """Parameters can be read at any time, and are those of now; the optimizer can be loaded."""

    def fn():
        torch.set_num_threads(1)

        def start():
            torch.manual_seed(0)
            model = Tower()
            fsdp = FSDP(model, reshard_after_forward=1)
            return model, fsdp, torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(model, fsdp, optimizer):
            model(0, dist.get_rank(), 0).backward()
            with torch.no_grad():
                model(1, dist.get_rank(), 0)  # the clip and the optimizer see shards none the less
            norm = fsdp.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        model, fsdp, optimizer = start()
        nothing = fsdp.clip_grad_norm_(1.0)
        norms = [step(model, fsdp, optimizer)]
        with fsdp.gathered():
            with fsdp.gathered(), torch.no_grad():
                inside = model(0, 0, 0).item()
            first = copy.deepcopy(model.state_dict())
        shards = copy.deepcopy(model.state_dict())
        saved = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            outside = model(0, 0, 0).item()
        model(0, 0, 0)  # no backward comes
        norms.append(step(model, fsdp, optimizer))

        other = start()
        other[0].load_state_dict(shards)
        other[2].load_state_dict(saved)
        norms.append(step(*other))
        last, again = whole_state(model, fsdp), whole_state(*other[:2])
        return nothing, norms, (inside, outside), first, last, again

    for nothing, norms, losses, first, last, again in ranks.run(fn, world_size=2):
        assert nothing == 0
        assert norms[0] > 0 and norms[1] == pytest.approx(norms[2])
        assert losses[0] == pytest.approx(losses[1])
        assert first["head.weight"].shape == (2, WIDTH)
        assert (first["head.weight"] - last["head.weight"]).abs().max() > 0.01
        torch.testing.assert_close(again, last)


def test_no_sync_within_no_sync_ends_where_the_outer_one_does():
    def fn():
        fsdp = FSDP(nn.Linear(2, 2))
        with fsdp.no_sync():
            with fsdp.no_sync():
                pass
            return fsdp.synchronizing

    assert ranks.run(fn, world_size=1) == [False]


def test_writing_to_an_input_in_place_is_an_error():
    """PyTorch's own, as under fully_shard: it would bypass the hook on backward."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            x += 1
            return self.linear(x)

    def fn():
        model = nn.Sequential(nn.Linear(2, 2), Writing())
        FSDP(model, [model[1]])
        model(torch.ones(1, 2))

    with pytest.raises(ranks.RankError, match="is a view and is being modified inplace"):
        ranks.run(fn, world_size=1)


def test_a_unit_holds_no_input_after_backward():
    """Not even until the garbage collector comes: nothing refers to itself."""

    def fn():
        torch.set_num_threads(1)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        FSDP(model, list(model))
        inputs = []
        model[1].register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
        gc.collect()
        gc.disable()
        model(torch.ones(2, 8)).sum().backward()
        return [x() is None for x in inputs]

    assert ranks.run(fn, world_size=1)[0] == [True]
