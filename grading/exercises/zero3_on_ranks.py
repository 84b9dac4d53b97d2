"""What lesson 07's answers are put through on a rank, beside what `sharded_run` measures.

ZeRO-3 is about when parameters are whole. So these note, as each layer computes, which units have
memory for their parameters, and what is alive when a forward or a backward ends. A layer whose
parameter is empty would read memory that is not there; it is lent zeros, and that is noted. The
same in backward, for what autograd has saved. Each is a `one_rank(answer, job)` for
`small_model.on_small_model`; every block of the model is a unit.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.checks.exercise import Answer, Case
from course_lib.measure import storage_bytes
from grading.exercises import sharded_run, small_model
from grading.exercises.sharded_run import ShardedRun
from grading.exercises.zero3_watching import Gradients, Saved, Whole, fill_new_memory

near = sharded_run.worded(small_model.near)
SAMPLES = 1  # few, so that activations are far smaller than a unit


class Block(nn.Module):
    """Two layers; where `tied`, they share one weight."""

    def __init__(self, width: int, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(hidden).tanh()).tanh()


class Blocks(nn.Module):
    """`model(batch)` is the mean squared error; batch: [samples, inputs beside targets]."""

    def __init__(self, width: int, count: int, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, tied) for _ in range(count))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, targets = batch.chunk(2, dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden - targets).square().mean()


def job(
    width: int, blocks: int, n_ranks: int, seed: int, tied: bool = False, frozen: bool = False
) -> Case:
    """A case. tied: both layers of a block share a weight; frozen: each block's first bias is."""
    more = "".join([", whose two layers share a weight"] * tied + [", one bias frozen"] * frozen)
    given = f"blocks of two layers of {width} x {width}{more}; each block is a unit"
    name = f"{n_ranks} ranks, {blocks} units"
    about = dict(width=width, blocks=blocks, ranks=n_ranks, seed=seed, tied=tied, frozen=frozen)
    return Case(name, (about,), given=given)


def gathered(answer: Answer, job: dict) -> dict:
    """`answer(unit)` for each unit; a forward, an update of all shards, a forward measured."""
    model, (first, second) = _built(job)
    run, seen = ShardedRun(model), Whole(model)
    versions = [p._version for p in model.parameters()]
    shards: dict[nn.Parameter, torch.Tensor] = {}
    for block in model.blocks:
        sizes = {p: p.numel() for p in block.parameters()}
        found = answer(block)
        if problem := _unfit(found, sizes, "shard"):
            return {problem: {}}
        shards |= found
    at_first = seen.units_whole()
    seen.lend_zeros()
    values = {"loss": model(first).detach()}
    with torch.no_grad():
        for shard in shards.values():
            shard *= 1.5
    seen.begin()
    with run.step(), Saved() as saved:
        loss = model(second)
    kept = storage_bytes(saved.tensors)  # for backward, by autograd
    seen.await_again(saved.tensors)
    written = any(v != p._version for v, p in zip(versions, model.parameters(), strict=True))
    values["loss after an update of the shards"] = loss.detach()
    report = _report(run, model, values)
    behind = storage_bytes(shards.values()) >= run.size
    with torch.no_grad():
        model(second)  # every unit is gathered once more, as backward would
    report["moments"] = {
        "units whole before the first forward": at_first,
        "units whole while a layer computes": seen.most,
        "a layer computes on an empty parameter": seen.lent,
        "whole parameters stay behind the shards": behind,
        "autograd keeps for backward": seen.in_units(kept),
        "autograd sees the parameters change": written,
        "what autograd saved comes back": not seen.awaited,
    }
    return report


def reduced(answer: Answer, job: dict) -> dict:
    """`answer(unit, gather, free)` for each unit; two micro-batches, of which the last counts."""
    model, batches = _built(job)
    seen = Whole(model)
    whole = storage_bytes(model.parameters())
    units = [ShardedUnit(block) for block in model.blocks]
    run = ShardedRun(model)
    run.size = whole
    sums = []
    saved, gradients = Saved(), Gradients(model, seen)
    for unit in units:
        sums.append(answer(unit.module, unit.gather, unit.free))
    at_end = []  # of each backward
    for batch in batches:
        gradients.begin()
        with saved:
            loss = model(batch)
        after_forward = seen.units_whole()
        with run.step():
            loss.backward()
        at_end.append(seen.units_whole())
    values = {}
    for unit, found in zip(units, sums, strict=True):
        trained = {p: p.numel() for p in unit.shards if p.requires_grad}
        if problem := _unfit(found, trained, "gradient shard"):
            return {problem: {}}
        names = {p: name for name, p in model.named_parameters()}
        values |= {names[p]: found[p] for p in trained}
    report = _report(run, model, values)
    report["moments"] = {
        "units whole between forward and backward": after_forward,
        "units whole while backward runs": gradients.whole,
        "backward reads an empty parameter": saved.lent,
        "whole gradients alive at once": seen.in_units(gradients.most, "one unit's at most"),
        "units whole when backward ends": max(at_end),
    }
    return report


class ShardedUnit:
    """A unit of which each rank keeps its shards: whole in forward, by `gather` and `free`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shards = {p: piece_of(p) for p in module.parameters()}
        self.free()
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda *_: self.free())

    def gather(self) -> None:
        for parameter, shard in self.shards.items():
            whole = shard.new_empty(dist.get_world_size() * len(shard))
            dist.all_gather_single(whole, shard)
            parameter.untyped_storage().resize_(parameter.nbytes)
            parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))

    def free(self) -> None:
        for parameter in self.shards:
            parameter.untyped_storage().resize_(0)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """As in the lesson: flat, with zeros up to a multiple of the ranks [N·s]."""
    return F.pad(tensor.detach().flatten(), (0, -tensor.numel() % dist.get_world_size()))


def piece_of(tensor: torch.Tensor) -> torch.Tensor:
    """As in the lesson: this rank's piece [s], a copy."""
    return padded(tensor).chunk(dist.get_world_size())[dist.get_rank()].clone()


def _built(job: dict) -> tuple[Blocks, list[torch.Tensor]]:
    """The model, the same on every rank; and two batches of this rank's own."""
    torch.set_num_threads(1)
    fill_new_memory()
    torch.manual_seed(job["seed"])
    model = Blocks(job["width"], job["blocks"], job["tied"])
    if job["frozen"]:
        for block in model.blocks:
            block.first.bias.requires_grad = False
    torch.manual_seed(1000 * job["seed"] + dist.get_rank())
    return model, [torch.randn(SAMPLES, 2 * job["width"]) for _ in range(2)]


def _report(run: ShardedRun, model: nn.Module, values: Mapping[str, torch.Tensor]) -> dict:
    """As `run` gives it, with parameters by their storages: an empty one keeps its shape."""
    unwritten = [
        name for name, x in values.items() if isinstance(x, torch.Tensor) and x.isnan().any()
    ]
    report = run.report({**values, **dict.fromkeys(unwritten, "made of memory not written (nan)")})
    report["resident"]["parameters"] = storage_bytes(model.parameters())
    return report


def _unfit(found: object, sizes: Mapping[nn.Parameter, int], what: str) -> str:
    """What is wrong with {parameter: shard}; '' if nothing is. `sizes`: elements of each whole."""
    shape = f"it must return a dict with a {what} for each parameter"
    if not isinstance(found, dict):
        return f"{shape}; it returned {found!r:.60}"
    for parameter, size in sizes.items():
        if parameter not in found:
            return f"{shape}; one is missing"
        if not isinstance(found[parameter], torch.Tensor):
            return f"{shape}; one is {found[parameter]!r:.60}"
        if found[parameter].numel() > -(-size // dist.get_world_size()):
            return f"it must return a dict with this rank's {what}s; one is longer than a shard"
    return ""
