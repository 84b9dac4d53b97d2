"""The ledger's peak of a step beside the real one, over a grid of jobs that run here.

    python benchmarks/peak_grid.py         all of it; or, with a word, the jobs that it names: ddp

Model × strategy × precision × checkpointing × wrap × ranks: each job trains for some steps on real
ranks, in this course's implementations, and `LiveBytes` follows later ones. The predicted peak is
from arithmetic alone (`ledger.peak`). Of a job the least of its ranks' peaks counts: all hold as
much, and where a thread of gloo's lets go late, one seems to hold more. Resident bytes after the
step must be the ledger's, with difference 0.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from course_lib import ledger, models, ranks, specs
from course_lib.measure import LiveBytes, model_state_bytes
from course_lib.sharded.ddp import DDP
from course_lib.sharded.fsdp import FSDP, MixedPrecision
from course_lib.sharded.master_weights import MasterWeights
from course_lib.sharded.zero1 import ZeRO1
from course_lib.sharded.zero2 import ZeRO2
from course_lib.sharded.zero3 import ZeRO3

LAB = specs.model("lab-25m")
WIDE = replace(LAB, name="wide", vocab_size=500, hidden_size=96, num_layers=3, num_heads=6)
WIDE = replace(WIDE, num_kv_heads=2, head_dim=16, intermediate_size=256)
TALL = replace(WIDE, name="tall", vocab_size=6000, num_layers=5, hidden_size=48, num_kv_heads=6)
TALL = replace(TALL, head_dim=8, intermediate_size=128)
BATCH, SEQ = 2, 48
TOKENS = torch.arange(BATCH * (SEQ + 1)).view(BATCH, SEQ + 1)
BUCKET_BYTES = 2**16
ZERO = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Job:
    spec: specs.ModelSpec
    strategy: str
    precision: str
    checkpointing: str
    wrap: str = "layer"

    def __str__(self) -> str:
        return (
            f"{self.spec.name}, {self.strategy}, {self.precision}, checkpointing "
            f"{self.checkpointing}, wrap {self.wrap}"
        )

    def ledgers(self, world_size: int) -> tuple:
        """What the ledger is told."""
        recipe = specs.Recipe(
            self.precision, micro_batch=BATCH, seq_len=SEQ, checkpointing=self.checkpointing
        )
        spread = specs.Strategy(self.strategy, world_size, gpus_per_node=2, wrap=self.wrap)
        return self.spec, recipe, spread

    def trained(self):
        """Model, optimizer, and a function that does one step."""
        by_fsdp = self.strategy in ("fsdp", "hsdp")
        half = self.precision in ("zero-bf16", "pure-bf16")
        model = models.build(self.spec, dtype=BF16 if half else torch.float32)
        if self.checkpointing == "full":
            for i, block in enumerate(model.model.layers):
                model.model.layers[i] = checkpoint_wrapper(block)
        if by_fsdp:
            world_size = torch.distributed.get_world_size()
            shape = (world_size // 2, 2) if self.strategy == "hsdp" else (world_size,)
            casts = MixedPrecision(param=BF16 if self.precision == "fsdp-bf16" else None)
            units = list(model.model.layers) if self.wrap == "layer" else []
            FSDP(model, units, mesh=init_device_mesh("cpu", shape), precision=casts)
            optimizer = torch.optim.AdamW(model.parameters())
        elif self.strategy == "ddp":
            wrapped = DDP(model, BUCKET_BYTES)
            kept = (model.parameters(), torch.optim.AdamW) if half else (model.parameters(),)
            optimizer = (MasterWeights if half else torch.optim.AdamW)(*kept)
        else:
            cut = {} if self.strategy == "zero3" else {"bucket_bytes": BUCKET_BYTES}
            optimizer = ZERO[self.strategy](model, torch.optim.AdamW, **cut)

        def step() -> None:
            optimizer.zero_grad()
            if self.strategy == "ddp":
                wrapped(TOKENS[:, :1])  # it begins a micro-batch, as wrapped.forward does
            made = model.loss(TOKENS)
            time.sleep(0.01)  # gloo's threads let go of what forward gathered last
            optimizer.backward(made) if self.strategy in ZERO else made.backward()
            del made
            optimizer.step()

        return model, optimizer, step


def grid() -> Iterator[tuple[int, Job]]:
    """World sizes and jobs."""
    for spec, world_sizes in ((WIDE, (2, 4)), (TALL, (3,))):
        for world_size in world_sizes:
            for checkpointing in ("none", "full"):
                for strategy in ("ddp", *ZERO):
                    for precision in ("fp32", "zero-bf16"):
                        yield world_size, Job(spec, strategy, precision, checkpointing)
                for precision in ("fp32", "fsdp-bf16", "pure-bf16"):
                    for wrap in ("layer", "model"):
                        yield world_size, Job(spec, "fsdp", precision, checkpointing, wrap)
                if world_size == 4:
                    yield world_size, Job(spec, "hsdp", "fp32", checkpointing)


def measured(jobs: list[Job]) -> list[tuple[int, dict[str, int]]]:
    """Of each job this rank's peak in a step that is not the first, and what it holds then."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        model, optimizer, step = job.trained()
        peaks = []
        step()
        step()  # DDP lays out its buckets anew
        for _ in range(2):
            with LiveBytes(model, optimizer) as live:
                step()
            peaks.append(live.peak.total)
        found.append((min(peaks), model_state_bytes(model, optimizer)))
    return found


def main(only: str = "") -> None:
    errors: dict[str, list[float]] = {}
    steady = 0
    points = [point for point in grid() if only in str(point[1])]
    for world_size in dict.fromkeys(size for size, _ in points):
        jobs = [job for size, job in points if size == world_size]
        results = ranks.run(measured, world_size=world_size, args=(jobs,), timeout=900)
        for i, job in enumerate(jobs):
            given = job.ledgers(world_size)
            cut = {"bucket_bytes": BUCKET_BYTES}
            predicted = ledger.peak(*given, ledger.CPU, **cut).bytes
            least = min(of_rank[i][0] for of_rank in results)
            error = predicted / least - 1
            states = ledger.model_states(*given).by_category()
            held = max((of_rank[i][1] for of_rank in results), key=lambda x: sum(x.values()))
            steady += sum(abs(held[name] - states[name]) for name in states)
            if abs(error) > 0.01:
                print(f"{world_size} ranks, {job}: {error:+.2%}")
            for key in (job.strategy, job.precision, f"checkpointing {job.checkpointing}", "all"):
                errors.setdefault(key, []).append(abs(error))
    print(f"{'':22}{'jobs':>6}{'median':>9}{'worst':>9}")
    for key, found in sorted(errors.items(), key=lambda x: (x[0] == "all", x[0])):
        print(f"{key:22}{len(found):6}{statistics.median(found):9.2%}{max(found):9.2%}")
    print(f"resident bytes after a step, measured minus predicted, in all: {steady}")


if __name__ == "__main__":
    main(*sys.argv[1:])
