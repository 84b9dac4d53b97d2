"""The skeleton that lesson 08's life cycles run on, and what is measured of them on a rank.

The lesson shows the same `Unit` and `attach`, shorter. A unit's `shard` [S] has this rank's rows of
all its parameters, padded, end to end; an answer decides when what is whole comes and goes:

    hooks = life_cycle(unit)       # {"pre_forward": f, "post_forward": f, …}, for each unit
    attach(unit, hooks)

Beside what `sharded_run` measures, a unit's states in the order in which it had them ("moments"),
and the most that was whole at a time ("peak"). What is empty is lent zeros, as reading it would
crash; see `zero3_watching`.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.checks.exercise import Answer, Case
from course_lib.measure import storage_bytes
from grading.exercises import sharded_run, small_model
from grading.exercises.sharded_run import ShardedRun
from grading.exercises.zero3_watching import Saved, fill_new_memory

near = sharded_run.worded(small_model.near)
SHARDED, WHOLE = "sharded", "whole"
HOOKS = ("pre_forward", "post_forward", "pre_backward", "post_backward")
BLOCKS = 5


class Blocks(nn.Module):
    """`model(batch)` is the mean squared error; first and last layer are the root unit's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(BLOCKS)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, targets = batch.chunk(2, dim=1)
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.last(hidden) - targets).square().mean()


class Unit:
    """A unit on one rank: its rows, in `shard` [S], and room for whole parameters."""

    def __init__(self, name: str, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self.root = name == "root"
        self.state, self.history = WHOLE, []
        rank = dist.get_rank()
        self.shard = torch.cat([padded(p)[rank] for p in parameters])
        self.free()

    def show(self, whole: torch.Tensor) -> None:
        """Give the parameters their memory, and these numbers: [N·S], or [N, S]."""
        sizes = [padded_shape(p)[1] for p in self.parameters]
        columns = whole.detach().view(dist.get_world_size(), -1).split(sizes, dim=1)
        for p, column in zip(self.parameters, columns, strict=True):
            p.untyped_storage().resize_(p.nbytes)
            p.data.view(-1).copy_(column.reshape(-1)[: p.numel()])
        self._is(WHOLE)

    def free(self) -> None:
        """Take the parameters' memory away."""
        for p in self.parameters:
            p.untyped_storage().resize_(0)
        self._is(SHARDED)

    def gradient(self) -> torch.Tensor:
        """This rank's whole gradient, [N·S], zeros where there is none; the parameters' go."""
        whole = [
            torch.zeros(padded_shape(p)) if p.grad is None else padded(p.grad)
            for p in self.parameters
        ]
        for p in self.parameters:
            p.grad = None
        return torch.cat(whole, dim=1).view(-1)

    def add(self, gradient: torch.Tensor) -> None:
        """Add to the shard's gradient, [S]."""
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += gradient

    def is_whole(self) -> bool:
        return all(p.untyped_storage().nbytes() for p in self.parameters)

    def _is(self, state: str) -> None:
        if state != self.state:
            self.history.append(state)
        self.state = state


def padded_shape(tensor: torch.Tensor) -> tuple[int, int]:
    """[N, elements of ⌈D/N⌉ rows]."""
    ranks = dist.get_world_size()
    return ranks, -(-len(tensor) // ranks) * tensor.shape[1:].numel()


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, with a line for each rank's rows, and zeros for those that are not there."""
    ranks, size = padded_shape(tensor)
    flat = tensor.detach().flatten()
    return F.pad(flat, (0, ranks * size - flat.numel())).view(ranks, size).clone()


def attach(unit: Unit, hooks: Mapping[str, Callable]) -> None:
    """Call these functions at the four moments of a unit's life. What they return is dropped."""
    arrived = []

    def before(*_):
        hooks["pre_forward"]()

    def after(module, inputs, output):
        hooks["post_forward"]()
        output.register_hook(comes)

    def comes(_):
        hooks["pre_backward"]()

    def on_gradient(p):
        arrived.append(p)
        if len(arrived) == len(unit.parameters):
            arrived.clear()
            hooks["post_backward"]()

    unit.module.register_forward_pre_hook(before)
    unit.module.register_forward_hook(after)
    for p in unit.parameters:
        p.register_post_accumulate_grad_hook(on_gradient)


def job(width: int, n_ranks: int, seed: int) -> Case:
    given = f"{BLOCKS} blocks of a {width} x {width} layer, each a unit; two such layers are the "
    about = dict(width=width, ranks=n_ranks, seed=seed)
    return Case(f"{n_ranks} ranks, {BLOCKS + 1} units", (about,), given=given + "root's")


def cycled(answer: Answer, job: dict) -> dict:
    """`answer(unit)` for each unit, then two steps, of which the second is measured."""
    torch.set_num_threads(1)
    fill_new_memory()
    torch.manual_seed(job["seed"])
    model = Blocks(job["width"])
    whole = storage_bytes(model.parameters())
    torch.manual_seed(1000 * job["seed"] + dist.get_rank())
    batches = [torch.randn(1, 2 * job["width"]) for _ in range(2)]
    of_root = [*model.first.parameters(), *model.last.parameters()]
    units = [Unit("root", model, of_root)]
    units += [Unit(f"block {i}", x, [*x.parameters()]) for i, x in enumerate(model.blocks)]
    run = ShardedRun(model)
    run.size = whole
    seen = Seen(model)
    for unit in units:
        hooks = answer(unit)
        if problem := _unfit(hooks):
            return {problem: {}}
        attach(unit, hooks)
    for batch in batches:
        _update(units)
        seen.most = 0
        for unit in units:
            unit.history.clear()
        with run.step(), Saved() as saved:
            loss = model(batch)
            between = [unit.name for unit in units if unit.is_whole()]
            loss.backward()
    values = {"loss": loss.detach()} | {unit.name: unit.shard.grad for unit in units}
    nans = [name for name, x in values.items() if x is not None and x.isnan().any()]
    values |= dict.fromkeys(nans, "made of memory not written (nan)")
    del loss
    moments = {
        "units whole when forward ends": ", ".join(between) or "none",
        "units whole when backward ends": ", ".join(u.name for u in units if u.is_whole())
        or "none",
        "a layer computes on an empty parameter": seen.lent,
        "backward reads an empty parameter": saved.lent,
    } | {f"states of {unit.name}": ", ".join(unit.history) or "no change" for unit in units}
    peak = {"bytes of whole parameters": seen.most}
    saved.tensors.clear()
    again = model(batch)  # what stays is counted where an answer may have kept something
    report = run.report(values) | {"moments": moments, "peak": peak}
    report["resident"]["parameters"] = storage_bytes(model.parameters())
    del again
    return report


class Seen:
    """As layers compute and gradients come: the most that was whole, and whether one was empty.

    A layer is lent zeros for a parameter that is empty.
    """

    def __init__(self, model: nn.Module) -> None:
        self.most, self.lent = 0, False
        self._shapes = {p: p.shape for p in model.parameters()}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._on_layer)
        for p in self._shapes:
            p.register_post_accumulate_grad_hook(self._look)

    def _look(self, *_) -> None:
        self.most = max(self.most, storage_bytes(self._shapes))

    def _on_layer(self, layer: nn.Linear, _) -> None:
        self._look()
        for p in layer.parameters(recurse=False):
            if p.untyped_storage().nbytes() < p.nbytes:
                self.lent = True
                p.data = torch.zeros(self._shapes[p])


def _update(units: list[Unit]) -> None:
    with torch.no_grad():
        for unit in units:
            if unit.shard.grad is not None:
                unit.shard -= 0.5 * unit.shard.grad
            unit.shard.grad = None


def _unfit(hooks: object) -> str:
    """What is wrong with {"pre_forward": f, …}; '' if nothing is."""
    if not isinstance(hooks, dict) or sorted(hooks) != sorted(HOOKS):
        return f"it must return a dict of functions for {', '.join(HOOKS)}; it gave {hooks!r:.60}"
    wrong = [name for name in HOOKS if not callable(hooks[name])]
    return f"{wrong[0]} must be a function; it is {hooks[wrong[0]]!r:.60}" if wrong else ""
