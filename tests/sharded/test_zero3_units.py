"""Which units of ZeRO-3 are whole, when, and models that make that hard to say."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zero_cases import (
    TIED,
    UNEVEN,
    Decoder,
    one_thread,  # noqa: F401 (a fixture)
    whole_state,
)

from course_lib import ranks
from course_lib.sharded.zero3 import ZeRO3


class Whole(TorchDispatchMode):
    """How many units had storage for their parameters, or were on their way, at each operator."""

    def __init__(self, zero: ZeRO3) -> None:
        super().__init__()
        self.zero, self.counts = zero, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts.append(self.now())
        return operator(*args, **(kwargs or {}))

    def now(self) -> int:
        return sum(
            unit.gathered is not None or any(s.untyped_storage().nbytes() for s in unit.spaces)
            for unit in self.zero.units
        )


@pytest.mark.parametrize("spec", [replace(each, num_layers=3) for each in (UNEVEN, TIED)])
def test_few_units_are_whole_at_a_time(spec):
    """A tied one is whole from its first use in forward to the last, and so in backward."""

    def fn():
        torch.set_num_threads(1)
        seen = []
        for prefetch in (0, 1, 2, 9):
            model = Decoder(spec)
            zero = ZeRO3(model, torch.optim.SGD, prefetch=prefetch)
            counts = []
            for n in range(2):
                with Whole(zero) as whole:
                    loss = model(n, dist.get_rank(), 0)
                    forward = whole.now()
                    zero.backward(loss)
                    counts.append((max(whole.counts), forward, whole.now()))
                zero.step()
            seen.append(counts)
        return seen

    units, tied = (5, 1) if spec.tied_embeddings else (6, 0)
    for seen in ranks.run(fn, world_size=2):
        for prefetch, counts in zip((0, 1, 2, 9), seen, strict=True):
            assert counts == 2 * [(min(prefetch + 1 + tied, units), 0, 0)], prefetch


def test_gathers_come_in_the_order_of_use_and_reductions_in_its_reverse():
    """From the first micro-batch on. A tied unit comes once, the first, and its gradients last."""

    def fn():
        torch.set_num_threads(1)
        logs = []
        for spec in (UNEVEN, TIED):
            model = Decoder(spec)
            zero = ZeRO3(model, torch.optim.SGD)
            names = {2 * 549: "embedding or head", 2 * 9: "norm"}  # elements that all ranks send
            before = len(ranks.entries())
            for micro in range(2):
                zero.backward(model(0, dist.get_rank(), micro))
            zero.step()
            issued = [entry.collective for entry in ranks.entries()[before:]]
            logs.append([(each.kind, names.get(each.elements, "block")) for each in issued[:-1]])
        return logs

    gather, reduce = "all_gather", "reduce_scatter"
    ends, block, norm = "embedding or head", "block", "norm"
    for untied, tied in ranks.run(fn, world_size=2):
        assert untied == 2 * [
            *((gather, unit) for unit in (ends, block, norm, ends)),
            *((gather, ends), (gather, norm), (reduce, ends), (gather, block), (reduce, norm)),
            *((gather, ends), (reduce, block), (reduce, ends)),
        ]
        assert tied == 2 * [
            *((gather, unit) for unit in (ends, block, norm)),
            *((gather, ends), (gather, norm), (gather, block)),
            *((reduce, norm), (reduce, block), (reduce, ends)),
        ]


# What is awkward.


class Stack(nn.Module):
    """Blocks of two layers, in a ModuleList, and a head; `call` says how blocks are called."""

    def __init__(self, call=None, width: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 1)
        self.call = call or (lambda stack, x, n, rank: stack.in_turn(x))

    def in_turn(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, n: int, rank: int) -> torch.Tensor:
        x = torch.sin(torch.arange(6.0).view(2, 3) + n + 10 * rank)
        return self.head(self.call(self, torch.tanh(self.stem(x)), n, rank)).square().sum()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.odd, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, parity: int = 0, shown: tuple | None = None):
        y = torch.tanh(self.up(x))
        if parity:
            y = y + self.odd(y)
        if shown is not None:  # nested, and given on
            return {"x": x + self.down(y), "shown": (shown[0], y.sum())}
        return x + self.down(y)


def on_odd_ranks(stack, x, n, rank):
    for block in stack.blocks:
        x = block(x, parity=rank % 2)
    return x


def a_block_twice(stack, x, n, rank):
    return stack.in_turn(stack.blocks[0](stack.in_turn(x)))


def each_time_another(stack, x, n, rank):
    """So what is guessed is wrong."""
    for i in ((0, 1, 2), (2, 0), (1,), (2, 1, 0))[n % 4]:
        x = stack.blocks[i](x)
    return x


def nested_outputs(stack, x, n, rank):
    memory, total = x * 2, 0.0
    for block in stack.blocks:
        made = block(x, shown=(memory,))
        x, (memory, extra) = made["x"], made["shown"]
        total = total + extra
    return x * total + memory


def in_place(stack, x, n, rank):
    for block in stack.blocks:
        x = block(x)
        x += 0.1
    return x


def checkpointed(stack, x, n, rank):
    for block in stack.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def checkpointed_as_one(stack, x, n, rank):
    return checkpoint(stack.in_turn, x, use_reentrant=False)


def checkpointed_inside(stack, x, n, rank):
    for block in stack.blocks:
        block.down.forward = lambda y, d=block.down: checkpoint(
            nn.functional.linear, y, d.weight, d.bias, use_reentrant=False
        )
    return stack.in_turn(x)


def low_rank(stack: Stack) -> None:
    """Trained is what a block does last, and what comes before it still leads to the stem."""
    stack.requires_grad_(False)
    for module in (stack.stem, *(block.down for block in stack.blocks)):
        module.requires_grad_(True)


def without_a_block(stack: Stack) -> None:
    stack.blocks[1].requires_grad_(False)


def with_a_shared_layer(stack: Stack) -> None:
    stack.blocks[2].up = stack.blocks[0].up


AWKWARD = {
    "on odd ranks": (on_odd_ranks, None),
    "a block twice": (a_block_twice, None),
    "a frozen block twice": (a_block_twice, lambda stack: stack.blocks[0].requires_grad_(False)),
    "each time another": (each_time_another, None),
    "nested outputs": (nested_outputs, None),
    "in place": (in_place, None),
    "checkpointed": (checkpointed, None),
    "checkpointed as one": (checkpointed_as_one, None),
    "checkpointed inside": (checkpointed_inside, None),
    "low rank": (None, low_rank),
    "low rank, checkpointed": (checkpointed, low_rank),
    "without a block": (None, without_a_block),
    "with a shared layer": (None, with_a_shared_layer),
    "two forwards": (None, None, 2),
    "two forwards, low rank": (on_odd_ranks, low_rank, 2),
}


def agree(call, change, forwards: int = 1, prefetch: int = 1) -> float:
    """Train on this rank with the others, and alone on what all of them see. The largest
    difference between the parameters; and no unit may be whole in the end."""
    torch.manual_seed(0)
    alone = Stack(call)
    if change:
        change(alone)
    shared = copy.deepcopy(alone)
    options = {"lr": 0.02, "weight_decay": 0.1}
    zero = ZeRO3(shared, torch.optim.SGD, prefetch=prefetch, **options)
    optimizer = torch.optim.SGD(alone.parameters(), **options)
    for n in range(4):
        zero.backward(sum(shared(n + i, dist.get_rank()) for i in range(forwards)))
        zero.step()
        zero.zero_grad()
        with torch.no_grad():  # evaluation, after which other units come than before
            shared(n + 1, dist.get_rank())
        for p in alone.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        for rank in range(dist.get_world_size()):
            loss = sum(alone(n + i, rank) for i in range(forwards))
            (loss / dist.get_world_size()).backward()
        optimizer.step()
        assert Whole(zero).now() == 0
    state = whole_state(shared, zero)
    return max(
        (state[name] - p.detach()).abs().max().item() for name, p in alone.named_parameters()
    )


@pytest.mark.parametrize("prefetch", [1, 2])
def test_awkward_models_train_as_alone(prefetch):
    def fn():
        torch.set_num_threads(1)
        return {name: agree(*case, prefetch=prefetch) for name, case in AWKWARD.items()}

    for differences in ranks.run(fn, world_size=3):
        for name, difference in differences.items():
            assert difference < 1e-5, (name, difference)


class Chatty(nn.Module):
    """Blocks that leave a loss of their own in a list which they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted = []
        for block in self.blocks:
            x = block(x, noted)
        return x.square().sum() + sum(noted)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, noted: list) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        noted.append(x.mean())
        return x


def test_a_list_that_a_unit_fills_is_the_callers_and_what_broke_off_leaves_nothing():
    """As one process does: also after a backward that raised, and a block called by itself."""

    class Broken(Exception):
        pass

    def broken(gradient):
        raise Broken

    def fn():
        torch.manual_seed(0)
        ours, alone = Chatty(), Chatty()
        alone.load_state_dict(ours.state_dict())
        zero = ZeRO3(ours, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 8).view(2, 4)
        for n in range(3):
            if n == 1:  # the first block's gradient never comes
                wrong = x.clone().requires_grad_()
                hidden = ours.blocks[0](wrong, [])
                hidden.register_hook(broken)
                loss = ours.blocks[1](hidden, []).sum()
                try:
                    zero.backward(loss)
                except Broken:
                    zero.zero_grad()
            zero.backward(ours(x))
            alone(x).backward()
            with torch.no_grad():
                ours.blocks[0](x, [])  # has the next one gathered ahead
            zero.step()
            zero.zero_grad()
            plain.step()
            plain.zero_grad()
        return whole_state(ours, zero), alone.state_dict()

    for ours, alone in ranks.run(fn, world_size=2):
        torch.testing.assert_close(ours, alone)
