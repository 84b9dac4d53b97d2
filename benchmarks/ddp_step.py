"""How long a training step of our DDP takes, beside PyTorch's in the same four processes.

    python benchmarks/ddp_step.py

A round is one step of each wrapper, on models of their own, alike; every second round goes the
other way. A ratio is taken within a round, so that what else the machine does falls on both, and
the median of them is shown, with its quartiles. PyTorch's DDP comes twice: as it is by default,
with buckets beside the gradients, and with gradient_as_bucket_view, where they share their memory
as ours do. Bytes are those behind gradients and buckets at the end of a backward.
"""

import statistics
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from course_lib import models, ranks, specs
from course_lib.measure import storage_bytes
from course_lib.sharded.ddp import DDP

WORLD_SIZE = 4
WARM_UP = 3
TOKENS = (1, 33)  # a rank's part of the batch: sequences, tokens of each

LAB = specs.model("lab-25m")
SMALL = replace(LAB, name="lab-25m with 2 layers and 2,003 words", num_layers=2, vocab_size=2003)
ROUNDS = {LAB: 60, SMALL: 200}  # the shorter a step, the more of them it takes
WRAPPERS = {
    "ours": DDP,
    "PyTorch's": DistributedDataParallel,
    "PyTorch's, views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
}


class Loss(torch.nn.Module):
    """A model and its loss in one, so that all of it passes through the wrapper."""

    def __init__(self, spec: specs.ModelSpec):
        super().__init__()
        self.model = models.build(spec)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.loss(tokens)


class Job:
    """One wrapper's model, with its optimizer."""

    def __init__(self, wrap, spec: specs.ModelSpec):
        self.model = wrap(Loss(spec))
        self.tokens = torch.randint(spec.vocab_size, TOKENS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> float:
        """Seconds until the slowest rank is done."""
        dist.barrier()
        start = time.perf_counter()
        self.model(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start


def times(spec: specs.ModelSpec, count: int) -> list[list[float]]:
    """Of each of `count` rounds: seconds of each wrapper's step, in the order of WRAPPERS."""
    jobs = [Job(wrap, spec) for wrap in WRAPPERS.values()]
    rounds = []
    for number in range(WARM_UP + count):
        order = jobs if number % 2 else jobs[::-1]
        taken = {job: job.step() for job in order}
        rounds.append([taken[job] for job in jobs])
    return rounds[WARM_UP:]


def held(name: str, spec: specs.ModelSpec) -> int:
    """Bytes behind the gradients and buckets of one wrapper, after the third backward."""
    job, buckets = Job(WRAPPERS[name], spec), []

    def reduce(_, bucket):
        buckets.append(bucket.buffer())
        return allreduce_hook(None, bucket)

    if isinstance(job.model, DistributedDataParallel):
        job.model.register_comm_hook(None, reduce)
    for _ in range(3):
        buckets.clear()
        job.optimizer.zero_grad()
        job.model(job.tokens).backward()
    if isinstance(job.model, DDP):
        buckets += [bucket.flat for bucket in job.model.buckets]
    return storage_bytes([*buckets, *(p.grad for p in job.model.parameters())])


def main() -> None:
    print(f"{WORLD_SIZE} ranks, {TOKENS[1] - 1} tokens on each, torch {torch.__version__}")
    for spec, count in ROUNDS.items():
        rounds = ranks.run(times, WORLD_SIZE, (spec, count), timeout=1200)[0]
        print(f"{spec.name}: {4 * spec.parameters / 2**20:.1f} MiB of gradients, {count} rounds")
        for name, taken in zip(WRAPPERS, zip(*rounds, strict=True), strict=True):
            mib = ranks.run(held, WORLD_SIZE, (name, spec))[0] / 2**20
            print(f"  {name:<17} {1000 * statistics.median(taken):7.1f} ms {mib:6.1f} MiB", end="")
            ratios = [ours / this for (ours, *_), this in zip(rounds, taken, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"   ours / this: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
