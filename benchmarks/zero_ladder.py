"""How long a step of each ZeRO stage and of FSDP takes, and what it holds, beside its peers.

    python benchmarks/zero_ladder.py                            all of it
    python benchmarks/zero_ladder.py --stage 2 --model small    a part of it
    python benchmarks/zero_ladder.py --profile                  where the steps' time goes

A round is one step of each contestant, on models of their own, alike, in the same processes and
in an order drawn anew. A ratio is taken within a round, so that what else the machine does falls on
both; shown are the median of them and its quartiles. PyTorch's DDP runs along with each stage.
The peak is the most bytes that were live at once on any rank, in the third step of a run of its
own: every tensor that Python or an operator has seen, by `measure.LiveBytes`. A win in time counts
where the ratio of peaks is at most 1, too.

All use torch.optim.AdamW as it is by default. Ours shows it one flat tensor, or one for each tensor
in ZeRO-3, and peers' the tensors; --adamw foreach and fused say how much of a ratio that is.
"""

import argparse
import contextlib
import gc
import importlib.util
import random
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib import ranks, specs
from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.measure import LiveBytes, Moment
from course_lib.ranks.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "peers"))
from contestants import DEEPSPEED, OURS, TORCH, Contestant, Job  # noqa: E402

WORLD_SIZE = 4
FSDP = "FSDP"
STAGES = (0, 1, 2, 3, FSDP)
WARM_UP = 2
TOKENS = (4, 129)  # a rank's part of the batch: sequences, tokens of each
SMALL = specs.read_config(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 2048,
    }
)
MODELS = {"small": SMALL, "lab-25m": specs.model("lab-25m")}
BUCKETS = {"small": 4 * 2**20, "lab-25m": BUCKET_BYTES}  # 25 MiB would hold all of the small one
ROUNDS = {"small": 30, "lab-25m": 12}
ADAMW = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ALONE = "without communication"
PHASES = ("forward", "backward", "update")


def contestants(stage: int | str) -> dict:
    """By name: ours, its peers, and the base."""
    if stage == FSDP:
        return {FSDP: OURS[FSDP], "ZeRO3": OURS["ZeRO3"]} | TORCH[3] | TORCH[0]
    ours = "DDP" if stage == 0 else f"ZeRO{stage}"
    peers = TORCH[stage] | (DEEPSPEED[stage] if importlib.util.find_spec("deepspeed") else {})
    return {ours: OURS[ours]} | peers | TORCH[0]


def batch(job: Job) -> torch.Tensor:
    return torch.randint(job.spec.vocab_size, TOKENS)


# Time.


def times(stage: int, job: Job, count: int) -> list[list[float]]:
    """Of each of `count` rounds: seconds of each contestant's step, until the slowest is done."""
    every = [make(job) for make in contestants(stage).values()]
    tokens, rounds, draw = batch(job), [], random.Random(0)  # the same order on all ranks
    for _ in range(WARM_UP + count):
        taken = {}
        for contestant in draw.sample(every, len(every)):
            dist.barrier()
            start = time.perf_counter()
            contestant.step([tokens])
            dist.barrier()
            taken[contestant] = time.perf_counter() - start
        rounds.append([taken[contestant] for contestant in every])
    return rounds[WARM_UP:]


# Bytes.


class Peak(LiveBytes):
    """Follows also what was there before."""

    def __enter__(self):
        super().__enter__()
        for found in gc.get_objects():
            if isinstance(found, torch.Tensor):
                self._add(found, "other")
        self.note("found")
        return self


def peak(stage: int, name: str, job: Job) -> Moment:
    """The moment with the most live bytes on this rank."""
    contestant, tokens = contestants(stage)[name](job), batch(job)
    for _ in range(WARM_UP):
        contestant.step([tokens])
    gc.collect()
    warnings.simplefilter("ignore")  # FSDP1 puts views in the place of parameters: no leaves
    with Peak(contestant.module) as live:
        contestant.step([tokens])
    return live.peak


def table(stage: int, job: Job, count: int, peaks: bool) -> None:
    rounds = ranks.run(times, WORLD_SIZE, (stage, job, count), timeout=3000)[0]
    held = []
    print(f"  {f'stage {stage}':<32}      ms   ours / this            peak, MiB  ours / this")
    for name, taken in zip(contestants(stage), zip(*rounds, strict=True), strict=True):
        ratios = [ours / this for (ours, *_), this in zip(rounds, taken, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {name:<32}{1000 * statistics.median(taken):8.1f}", end="")
        print(f"   {middle:.3f} ({low:.3f} to {high:.3f})", end="" if peaks else "\n", flush=True)
        if peaks:
            moments = ranks.run(peak, WORLD_SIZE, (stage, name, job), timeout=600)
            held.append(max(moment.total for moment in moments))
            print(f"{held[-1] / 2**20:11.1f} {held[0] / held[-1]:12.3f}", flush=True)


# Where a step's time goes.


class Alone(Contestant):
    """The compute of a step without communication: all of the model, and of the optimizer 1/N."""

    def wrap(self, shards: int):
        self.shards = shards
        return self.module

    def make_optimizer(self):
        shard = list(self.module.parameters())
        if self.shards > 1:
            flat = torch.zeros(sum(p.numel() for p in shard) // self.shards, requires_grad=True)
            flat.grad = torch.ones_like(flat)
            shard = [flat]
        return torch.optim.AdamW(shard, **self.job.options)

    def update(self):
        self.optimizer.step()
        self.module.zero_grad()


class Clock:
    """Notes what each phase of a step takes, and each wait for a collective from Python."""

    def __init__(self) -> None:
        self.taken: dict[str, tuple[float, ...]] = {}  # by phase: what _clocks() says
        self.waits: list[tuple[str, int | None, float, float]] = []  # phase, index, begin, end

    @contextlib.contextmanager
    def measuring(self, phase: str):
        wait, recorder, begin = dist.Work.wait, Recorder.current, _clocks()

        def timed(work, *args, **options):
            index, start = recorder._works.get(work), recorder._now()
            result = wait(work, *args, **options)
            self.waits.append((phase, index, start, recorder._now()))
            return result

        dist.Work.wait = timed
        yield
        dist.Work.wait = wait
        self.taken[phase] = tuple(b - a for a, b in zip(begin, _clocks(), strict=True))


def _clocks() -> tuple[float, float, float]:
    """Seconds by the wall, of this thread on a core, and of all of this process's threads."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def phases(stage: int, job: Job, count: int) -> list[dict[str, tuple]]:
    """Of each round and contestant: what its step took on this rank, and its waits."""
    makes = contestants(stage) | {ALONE: partial(Alone, shards=WORLD_SIZE if stage else 1)}
    every = {name: make(job) for name, make in makes.items()}
    tokens, rounds, draw = batch(job), [], random.Random(0)
    for _ in range(WARM_UP + count):
        rounds.append({})
        for name in draw.sample(list(every), len(every)):
            contestant, clock = every[name], Clock()
            dist.barrier()
            with clock.measuring("forward"):
                loss = contestant.forward(tokens)
            with clock.measuring("backward"):
                contestant.backward(loss)
            with clock.measuring("update"):
                contestant.update()
            del loss
            rounds[-1][name] = clock.taken, clock.waits
    return rounds[WARM_UP:]


def where(stage: int, job: Job, count: int) -> None:
    """Print, for each contestant, what its step consisted of, by phase: means over ranks."""
    results = ranks.run(phases, WORLD_SIZE, (stage, job, count), timeout=3000)
    issued = [[entry.start for entry in entries] for entries in results.log]
    ready = [max(starts) for starts in zip(*issued, strict=False)]  # when all ranks had come

    def middle(what, name: str, phase: str) -> float:
        """Of what a rank's step took, the median of rounds, in ms."""
        rounds = zip(*results, strict=True)
        means = (statistics.mean(what(*of[name], phase) for of in each) for each in rounds)
        return 1000 * statistics.median(means)

    def waited(_, waits, phase: str) -> float:
        return sum(end - begin for where, _, begin, end in waits if where == phase)

    def for_others(_, waits, phase: str) -> float:
        waits = (wait[1:] for wait in waits if wait[0] == phase and wait[1] is not None)
        return sum(max(min(ready[i], end) - begin, 0) for i, begin, end in waits)

    for name in contestants(stage):
        rows = {}
        for phase in PHASES:
            wall, core, threads = (
                middle(lambda taken, _, phase, i=i: taken[phase][i], name, phase) for i in range(3)
            )
            compute = middle(lambda taken, _, phase: taken[phase][1], ALONE, phase)
            wait, others = middle(waited, name, phase), middle(for_others, name, phase)
            rows[phase] = {
                "compute, as without communication": compute,
                "the rest: copies, Python, issuing": core - compute,
                "waiting until other ranks come": others,
                "waiting for what they send": wait - others,
                "no core, or waiting in C++": wall - core - wait,
                "all": wall,
                "(other threads on a core)": threads - core,
            }
        print(f"  {name:<36}{''.join(f'{phase:>10}' for phase in PHASES)}       all, ms")
        for what in rows[PHASES[0]]:
            values = [rows[phase][what] for phase in PHASES]
            print(f"    {what:<34}{''.join(f'{v:10.1f}' for v in [*values, sum(values)])}")


def _stage(name: str) -> int | str:
    return int(name) if name.isdigit() else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=_stage, choices=STAGES, action="append")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--adamw", choices=ADAMW, default="default")
    parser.add_argument("--rounds", type=int, help="how many, instead of enough")
    parser.add_argument("--no-peaks", action="store_true", help="measure time alone")
    parser.add_argument("--profile", action="store_true", help="show where a step's time goes")
    chosen = parser.parse_args()
    print(f"{WORLD_SIZE} ranks, {TOKENS[0]} x {TOKENS[1] - 1} tokens on each, {torch.__version__}")
    for model in chosen.model or MODELS:
        options = {"lr": 1e-3} | ADAMW[chosen.adamw]
        job = Job(MODELS[model], options=options, bucket_bytes=BUCKETS[model])
        count = chosen.rounds or ROUNDS[model]
        print(f"{model}: {job.spec.parameters:,} parameters, {count} rounds")
        for stage in chosen.stage or STAGES:
            if chosen.profile:
                where(stage, job, count)
            else:
                table(stage, job, count, not chosen.no_peaks)


if __name__ == "__main__":
    main()
