"""What FSDP is put through: a feature a case, beside fully_shard and beside one process.

All ranks begin with the same weights, and each trains on its own part of the batch. Ours and
PyTorch's train in turn on the same ranks; the one process takes the mean of all parts' gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from zero_cases import STEPS, close

from course_lib import ranks
from course_lib.sharded import wrapping
from course_lib.sharded.fsdp import FSDP
from course_lib.sharded.fsdp_unit import MixedPrecision

ADAMW = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}  # eps: noise in tiny gradients stays noise
WIDTH, INNER = 5, 7  # rows that no number of ranks divides


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """A stem, `deep` blocks, a head; `call(tower, x)` calls the blocks, by default in turn."""

    def __init__(self, call: Callable | None = None, deep: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(deep))
        self.head = nn.Linear(WIDTH, 2)
        self.call = call or in_turn

    def forward(self, n: int, rank: int, micro: int) -> torch.Tensor:
        x = torch.sin(torch.arange(12.0).view(4, 3) * 0.7 + n + 10 * rank + 3 * micro)
        x = self.stem(x.to(self.stem.weight.dtype))
        return self.head(self.call(self, x)).square().mean()


def in_turn(tower: Tower, x: torch.Tensor, call: Callable = lambda f, x: f(x)) -> torch.Tensor:
    for block in tower.blocks:
        x = call(block, x)
    return x


def twice(tower: Tower, x: torch.Tensor) -> torch.Tensor:
    return in_turn(tower, tower.blocks[0](x))


def without_the_second(tower: Tower, x: torch.Tensor) -> torch.Tensor:
    return tower.blocks[2](tower.blocks[0](x))


def with_one_in_vain(tower: Tower, x: torch.Tensor) -> torch.Tensor:
    tower.blocks[1](x)
    return without_the_second(tower, x)


def written_to(tower: Tower, x: torch.Tensor) -> torch.Tensor:
    for block in tower.blocks:
        x = block(x).view(-1, WIDTH)
        x += 0.1
    return x


def outside(reentrant: bool) -> Callable:
    """checkpoint(unit)"""
    return lambda tower, x: in_turn(tower, x, partial(checkpoint, use_reentrant=reentrant))


def inside(reentrant: bool) -> Callable[[], Tower]:
    """unit(checkpoint)"""

    def build() -> Tower:
        tower = Tower()
        for block in tower.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        return tower

    return build


def frozen(*parts: str) -> Callable[..., Tower]:
    def build(call: Callable | None = None) -> Tower:
        tower = Tower(call)
        for name, p in tower.named_parameters():
            p.requires_grad_(not any(part in name for part in parts))
        return tower

    return build


def tied_in_a_unit() -> Tower:
    tower = Tower()
    tower.blocks[1].down.bias = tower.blocks[1].norm.bias
    tower.other = nn.Linear(WIDTH, WIDTH)
    tower.other.bias = tower.stem.bias
    tower.call = lambda tower, x: in_turn(tower, x + tower.other(x))
    return tower


def unused() -> Tower:
    """Without a gradient AdamW leaves a parameter as it is, with zeros it decays: these are 0."""
    tower = Tower()
    tower.blocks[1].unused = nn.Parameter(torch.zeros(WIDTH, 3))
    return tower


BF16 = MixedPrecision(param=torch.bfloat16, reduce=torch.float32, output=torch.float32)


@dataclass(frozen=True)
class Case:
    """`options` are FSDP's, and fully_shard is told the same. `log` is how the collectives of both
    compare: "same", "sorted" (the same in another order), or why they differ."""

    build: Callable[[], nn.Module] = Tower
    options: dict = field(default_factory=dict)
    wrap: Callable[[nn.Module], list[nn.Module]] = wrapping.blocks
    shape: tuple[int, ...] | None = None  # of the mesh
    micro_batches: int = 1
    no_sync: bool = False  # but in the last micro-batch
    max_norm: float = math.inf
    evaluates: bool = False
    log: str = "same"

    @property
    def rtol(self) -> float:
        """Towards one process, which computes in fp32."""
        return 2e-2 if "precision" in self.options else 1e-4

    def clips(self, n: int) -> bool:  # without a limit it is a look at the norm
        return self.max_norm < math.inf or n % 5 == 0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def mesh(self):
        names = ("replicas", "shards")[-len(self.shape or ()) :]
        return init_device_mesh("cpu", self.shape, mesh_dim_names=names) if self.shape else None


def sharded(case: Case) -> tuple[nn.Module, FSDP]:
    model = case.model()
    return model, FSDP(model, case.wrap(model), mesh=case.mesh(), **case.options)


def fully_sharded(case: Case) -> nn.Module:
    """By fully_shard, told to do the same."""
    model, options = case.model(), case.options
    precision = options.get("precision", MixedPrecision())
    dtypes = precision.param, precision.reduce
    reshard = options.get("reshard_after_forward", True)
    shared = {"mesh": case.mesh()} if case.shape else {}
    if "offload" in options:
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    units = [module for module in case.wrap(model) if module is not model]
    for module in units:
        policy = MixedPrecisionPolicy(*dtypes)
        fully_shard(module, reshard_after_forward=reshard, mp_policy=policy, **shared)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(*dtypes, precision.output), **shared)
    for i, module in enumerate(units):  # without these, backward has 1 ahead
        if (count := options.get("forward_prefetch", 1)) > 1:
            module.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + count])
        if (count := options.get("backward_prefetch", 1)) > 1:
            module.set_modules_to_backward_prefetch(units[max(i - count, 0) : i][::-1])
    return model


def train(case: Case) -> dict[str, dict]:
    """On this rank, by ours and by theirs: losses, the gradients' norms, the rank's shards in
    the end."""
    model, fsdp = sharded(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def synchronize(value: bool) -> None:
        fsdp.synchronizing = value

    ours = _steps(case, model, optimizer, synchronize, lambda: fsdp.clip_grad_norm_(case.max_norm))
    ours["shards"] = {name: p.detach().clone() for name, p in model.named_parameters()}

    model = fully_sharded(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def clip() -> float:
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        return float(norm.full_tensor())

    theirs = _steps(case, model, optimizer, model.set_requires_gradient_sync, clip)
    for module in model.modules():  # after an evaluation the root is still whole
        if isinstance(module, FSDPModule):
            module.reshard()
    theirs["shards"] = {name: p.detach().to_local() for name, p in model.named_parameters()}
    return {"ours": ours, "theirs": theirs}


def _steps(case: Case, model, optimizer, synchronize: Callable, clip: Callable) -> dict:
    losses, norms = [], []
    for n in range(STEPS):
        if n == STEPS - 1:
            _mark()
        for micro in range(case.micro_batches):
            synchronize(not case.no_sync or micro == case.micro_batches - 1)
            loss = model(n, dist.get_rank(), micro)
            losses.append(loss.item())
            (loss / case.micro_batches).backward()
        if n == STEPS - 1:
            _mark()
        if case.clips(n):
            norms.append(clip())
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluates:
            with torch.no_grad():
                losses.append(model(n + 1, dist.get_rank(), 0).item())
    return {"losses": losses, "norms": norms}


def _mark() -> None:
    """A broadcast of one byte, between which stands what the last forward and backward sent."""
    dist.broadcast(torch.zeros(1, dtype=torch.uint8), 0)


def _marked(log) -> list[list[tuple]]:
    """What stood there: ours and theirs of the first case, and so on."""
    told = [(entry.kind, entry.elements, entry.dtype, entry.ranks) for entry in log]
    marks = [i for i, each in enumerate(told) if each[2] == "uint8"]
    return [told[a + 1 : b] for a, b in zip(marks[::2], marks[1::2], strict=True)]


def alone(case: Case, world_size: int) -> dict:
    """The same in one process, on the parts of all: losses of each, norms, parameters."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [[] for _ in range(world_size)], []
    for n in range(STEPS):
        for rank in range(world_size):
            for micro in range(case.micro_batches):
                loss = model(n, rank, micro)
                losses[rank].append(loss.item())
                (loss / case.micro_batches / world_size).backward()
        if case.clips(n):
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluates:
            for rank in range(world_size):
                losses[rank].append(model(n + 1, rank, 0).item())
    whole = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "whole": whole}


def check(cases: dict[str, Case], world_size: int) -> None:
    """Train each as ours, as fully_shard and alone, and compare all there is."""

    def fn():
        torch.set_num_threads(1)
        return {name: train(case) for name, case in cases.items()}

    results = ranks.run(fn, world_size=world_size, timeout=300)
    logs = [_marked(results.log[rank]) for rank in range(world_size)]
    for name, case in cases.items():
        one = alone(case, world_size)
        shards = (case.shape or (world_size,))[-1]
        for rank, result in enumerate(result[name] for result in results):
            ours, theirs = result["ours"], result["theirs"]
            for what in ("losses", "norms", "shards"):
                close(ours[what], theirs[what], f"{name}, {what}, fully_shard", 1e-4)
            close(ours["losses"], one["losses"][rank], f"{name}, losses", case.rtol)
            close(ours["norms"], one["norms"], f"{name}, norms", case.rtol)
            sent_by_ours, sent_by_theirs = logs[rank].pop(0), logs[rank].pop(0)
            if case.log in ("same", "sorted"):
                order = sorted if case.log == "sorted" else list
                assert order(sent_by_ours) == order(sent_by_theirs), name
            if case.log != "same":
                assert sent_by_ours != sent_by_theirs, f"{name} has no difference to explain"
        for first in range(0, world_size, shards):  # of a replica
            parts = [results[first + i][name]["ours"]["shards"] for i in range(shards)]
            whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            close(whole, one["whole"], f"{name}, parameters", case.rtol)
        if case.max_norm < math.inf:
            assert max(one["norms"]) > case.max_norm, f"{name} has nothing to clip"
