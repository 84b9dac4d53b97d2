"""What all stages of ZeRO are put through, and one process that does the same without them.

Each rank begins with weights of its own and trains on its own parts of the batch. The reference
takes the mean of the gradients of all parts, and lets PyTorch's optimizer update each tensor.
"""

import contextlib
import copy
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import comm, ledger, models, ranks, specs
from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.measure import model_state_bytes, storage_bytes
from course_lib.specs import Recipe, Strategy

STEPS = 20
WORLDS = (1, 2, 3, 4, 8)
VOCAB = 13
SMALL = 400  # bytes in a bucket: many buckets, and tensors that are larger than one
CONFIG = {
    "model_type": "llama",
    "hidden_size": 18,
    "intermediate_size": 35,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 61,
}
UNEVEN = specs.read_config(CONFIG)  # 5,004 parameters: 4 more than a multiple of 8
EVEN = specs.read_config(  # 7,560 parameters, which 2, 3, 4 and 8 divide
    CONFIG | {"hidden_size": 24, "intermediate_size": 40, "vocab_size": 64, "head_dim": 8}
)
TIED = replace(UNEVEN, tied_embeddings=True)

ADAMW = torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-4}  # eps: noise in tiny gradients stays noise
MOMENTUM = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}


class Net(nn.Module):
    """Has what is awkward: `ever` is used twice, `never` not at all, `odd` by odd ranks alone.

    The head is the embedding, `still` is frozen, and `scale` is a buffer.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 6)
        self.ever, self.never, self.odd, self.still = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(dropout)
        self.still.requires_grad_(False)
        self.register_buffer("scale", torch.rand(6) + 0.5)

    def forward(self, n: int, rank: int, micro: int) -> torch.Tensor:
        seed = 10_000 * n + 100 * rank + micro
        tokens = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)  # of dropout
        hidden = self.embedding(tokens)
        hidden = torch.tanh(self.ever(self.ever(hidden)) + self.still(hidden)) * self.scale
        if rank % 2:
            hidden = hidden + self.odd(hidden)
        logits = self.norm(self.dropout(hidden)) @ self.embedding.weight.T
        return F.cross_entropy(logits[:-1], tokens[1:])


class Three(nn.Module):
    """Three elements: of eight ranks, five own padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, n: int, rank: int, micro: int) -> torch.Tensor:
        x = torch.tensor([1.0, math.sin(n + 10 * rank + 100 * micro)])
        return (self.linear(x) - x.prod()).square().sum()


class Decoder(nn.Module):
    def __init__(self, spec: specs.ModelSpec = UNEVEN) -> None:
        super().__init__()
        self.llama = models.Llama(spec)

    def forward(self, n: int, rank: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * n + 100 * rank + micro)
        return self.llama.loss(torch.randint(61, (2, 9), generator=generator))


def by_decay(model: nn.Module) -> list[dict]:
    """Weight decay for matrices alone, as one does."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-2},
    ]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from two threads, and lose much where others are at work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module] = Net
    optimizer: tuple[type, dict] = ADAMW
    micro_batches: int = 1
    options: dict = field(default_factory=dict)  # of ZeRO
    groups: Callable[[nn.Module], list[dict]] | None = None
    dtype: torch.dtype = torch.float32
    halve: int = 0  # the learning rate, every so many steps
    broken: tuple[int, ...] = ()  # steps in which one rank's gradient of one element is inf

    @property
    def rtol(self) -> float:
        return 1e-4 if self.dtype == torch.float32 else 2e-2

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().to(self.dtype)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, self.halve or STEPS, gamma=0.5)


CLIPPED = {"max_norm": 0.2}
LOW = {"reduce_dtype": torch.float32, "bucket_bytes": 4_000}
CASES = {
    "accumulation, overflow": Case(
        optimizer=MOMENTUM, micro_batches=3, options={"bucket_bytes": SMALL}, broken=(1, 4, 5)
    ),
    "clipping": Case(optimizer=MOMENTUM, micro_batches=2, options=CLIPPED),
    "groups, schedule": Case(options={"bucket_bytes": SMALL}, groups=by_decay, halve=5),
    "dropout": Case(lambda: Net(dropout=0.5), MOMENTUM),
    "three elements": Case(Three, options={"bucket_bytes": 1, **CLIPPED}),
    "16 bits": Case(lambda: Decoder(TIED), dtype=torch.bfloat16, options={"bucket_bytes": 4_000}),
    "16 bits, reduced as 32": Case(lambda: Decoder(), MOMENTUM, 2, LOW, by_decay, torch.bfloat16),
}
FEW = ("accumulation, overflow", "three elements")


def train(stage, case: Case) -> dict:
    """On each rank: the gradients' norms, the model's state dict, dtypes of what was reduced."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = case.model(seed=rank)
    optimizer_class, options = case.optimizer
    groups = case.groups and case.groups(model)
    zero = stage(model, optimizer_class, groups=groups, **case.options, **options)
    schedule = case.scheduler(zero.optimizer)
    last = [p for p in model.parameters() if p.requires_grad][-1]
    before, norms = len(ranks.entries()), []
    for n in range(STEPS):
        spoil = n in case.broken and rank == world_size - 1
        hook = last.register_hook(overflown) if spoil else None
        for micro in range(case.micro_batches):
            zero.backward(model(n, rank, micro) / case.micro_batches)
        norms.append(zero.step())
        zero.zero_grad()
        schedule.step()
        if hook:
            hook.remove()
    reduced = {e.dtype for e in ranks.entries()[before:] if e.kind == "reduce_scatter"}
    return {"norms": norms, "state": whole_state(model, zero), "reduced": reduced}


def side_by_side(ours, zero, theirs, optimizer) -> list[tuple[float, float]]:
    """Train both on this rank's parts of the batch, 20 steps. The losses of each step."""
    losses = []
    for n in range(STEPS):
        loss = ours(n, dist.get_rank(), 0)
        zero.backward(loss)
        zero.step()
        zero.zero_grad()
        their_loss = theirs(n, dist.get_rank(), 0)
        their_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), their_loss.item()))
    return losses


def check_alike(losses: list[tuple[float, float]], ours: dict, theirs: dict) -> None:
    close(*zip(*losses, strict=True), "losses", 1e-5)
    close(ours, theirs, "parameters", 1e-4)


def whole_state(model: nn.Module, zero) -> dict:
    """The model's state dict, of whole parameters where `zero` shards them."""
    with getattr(zero, "gathered", contextlib.nullcontext)():
        return copy.deepcopy(model.state_dict())


def overflown(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[-1] = float("inf")
    return gradient


@cache
def in_one_process(name: str, world_size: int) -> tuple[list[float], dict]:
    """The gradients' norms, and the state dict of rank 0's model trained on the parts of all."""
    case = CASES[name]
    model = case.model(seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = {p: p.detach().float().requires_grad_() for p in trained}
    groups = case.groups(model) if case.groups else [{"params": trained}]
    groups = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups]
    optimizer_class, options = case.optimizer
    optimizer = optimizer_class(groups, **options)
    schedule = case.scheduler(optimizer)
    parts = [(r, m) for r in range(world_size) for m in range(case.micro_batches)]
    norms = []
    for n in range(STEPS):
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for rank, micro in parts:
            loss = model(n, rank, micro)
            for p, grad in zip(
                trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
            ):
                if grad is not None:
                    masters[p].grad += grad.float() / len(parts)
        norm = nn.utils.clip_grad_norm_(
            list(masters.values()), case.options.get("max_norm", math.inf)
        )
        if n in case.broken:
            norm = math.inf
        else:
            optimizer.step()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
        schedule.step()
        norms.append(float(norm))
    return norms, model.state_dict()


def check_training(stage, world_size: int) -> None:
    """Cases on real ranks, against one process: all of them on 3 ranks, else a few."""
    cases = CASES if world_size == 3 else {name: CASES[name] for name in FEW}

    def fn():
        torch.set_num_threads(1)
        return {name: train(stage, case) for name, case in cases.items()}

    results = ranks.run(fn, world_size=world_size)
    for name, case in cases.items():
        norms, state = in_one_process(name, world_size)
        for result in (result[name] for result in results):
            close(result["norms"], norms, name, case.rtol)
            close(result["state"], state, name, case.rtol)
            reduced = case.options.get("reduce_dtype", case.dtype)
            assert result["reduced"] == {str(reduced).removeprefix("torch.")}, name
            for key, value in results[0][name]["state"].items():
                assert torch.equal(result["state"][key], value), f"{name}: {key}"
        if "max_norm" in case.options:
            assert max(norms) > case.options["max_norm"], f"{name} has nothing to clip"


def close(actual, expected, name: str, rtol: float) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol / 10, msg=lambda message: f"{name}: {message}"
    )


# Bytes and collectives.

DTYPES = {"fp32": torch.float32, "zero-bf16": torch.bfloat16}
OPTIMIZERS = {"adamw": ADAMW, "sgd-momentum": MOMENTUM}


@dataclass(frozen=True)
class Job:
    spec: specs.ModelSpec = UNEVEN
    precision: str = "fp32"
    optimizer: str = "adamw"
    micro_batches: int = 1
    bucket_bytes: int = BUCKET_BYTES
    frozen: bool = False

    def model(self) -> nn.Module:
        model = models.build(self.spec, dtype=DTYPES[self.precision])
        if self.frozen:
            model.model.layers.requires_grad_(False)
        return model

    def recipe(self) -> Recipe:
        trained = sum(p.numel() for p in self.model().parameters() if p.requires_grad)
        share = trained / self.spec.parameters
        return Recipe(
            self.precision, self.optimizer, grad_accum=self.micro_batches, trainable=share
        )


JOBS = {
    "fp32": Job(),
    "fp32, even": Job(EVEN, optimizer="sgd-momentum", micro_batches=3),
    "fp32, tied": Job(TIED, micro_batches=2),
    "fp32, frozen": Job(frozen=True),
    "fp32, buckets": Job(bucket_bytes=4_000, micro_batches=2),
    "zero-bf16": Job(precision="zero-bf16", micro_batches=2),
    "zero-bf16, even": Job(EVEN, precision="zero-bf16"),
    "zero-bf16, tied": Job(TIED, precision="zero-bf16", optimizer="sgd-momentum"),
    "zero-bf16, frozen": Job(precision="zero-bf16", frozen=True, bucket_bytes=2_000),
}


def account(stage, job: Job) -> tuple[dict[str, int], int, int, int]:
    """Bytes after a second step, by category and of whatever else this process has come to hold;
    and how many collectives there were before that step and after it."""
    others = live_bytes()
    model = job.model()
    optimizer_class, options = OPTIMIZERS[job.optimizer]
    zero = stage(model, optimizer_class, bucket_bytes=job.bucket_bytes, **options)
    tokens = torch.arange(24).view(2, 12)
    for _ in range(2):
        zero.zero_grad()
        before = len(ranks.entries())
        for _ in range(job.micro_batches):
            zero.backward(model.loss(tokens))
        zero.step()
    del tokens
    held = model_state_bytes(model, zero)
    after = len(ranks.entries())
    for _ in range(8):  # gloo's threads hold the tensors of their last collective
        dist.barrier()
    for _ in range(100):
        live = live_bytes() - others
        if live == sum(held.values()):
            break
        time.sleep(0.02)
    return held, live, before, after


def live_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    return storage_bytes(x for x in gc.get_objects() if isinstance(x, torch.Tensor))


def predicted(job: Job, sharded: Strategy) -> tuple[dict, dict, dict]:
    """By the ledgers: bytes of each category; collectives of each kind, and their bytes."""
    states = ledger.model_states(job.spec, job.recipe(), sharded)
    plan = comm.step(job.spec, job.recipe(), sharded, job.bucket_bytes)
    return states.by_category(), plan.counts(), plan.bytes_by_kind()


def check_bytes_and_collectives(
    stage, strategy: str, world_size: int, predicted: Callable = predicted
) -> None:
    def fn():
        torch.set_num_threads(1)
        return {name: account(stage, job) for name, job in JOBS.items()}

    results = ranks.run(fn, world_size=world_size)
    for name, job in JOBS.items():
        states, counts, nbytes = predicted(job, Strategy(strategy, world_size))
        for rank, result in enumerate(results):
            held, live, start, end = result[name]
            assert held == states, name
            assert live == sum(states.values()), name
            issued = results.log[rank][start:end]
            norms = [entry.collective for entry in issued if entry.kind == "all_reduce"]
            assert norms == [specs.Collective("all_reduce", 1, 8, world_size)], name
            of = {kind: [e for e in issued if e.kind == kind] for kind in counts}
            assert len(issued) == 1 + sum(map(len, of.values())), name
            sent = {kind: sum(e.bytes_per_rank for e in entries) for kind, entries in of.items()}
            assert sent == nbytes, name
            assert {kind: len(entries) for kind, entries in of.items()} == counts, name


def assert_small(errors: dict) -> None:
    """Of peaks from arithmetic alone."""
    sizes = sorted(map(abs, errors.values()))
    assert sizes[len(sizes) // 2] <= 0.01, errors
    assert sizes[-1] <= 0.03, errors
