"""Twenty steps of every contestant on the same model, data and seeds, and their comparison."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from operator import add

import torch
import torch.distributed as dist
from contestants import Job
from torch.testing import assert_close

from course_lib import ranks, specs

STEPS = 20
RTOL = 1e-4
TOKENS = (2, 12)  # a micro-batch: sequences, tokens of each
SPEC = specs.read_config(
    {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 35,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
    }
)
# foreach spares DTensors much, as they are called once for all. Adam divides by the size of the
# gradient, so in one that is zero but for rounding the rounding counts lr / eps times: at 5 times
# it stays below 1e-6 in 20 steps.
PLAIN = Job(SPEC, options={"lr": 5e-3, "eps": 1e-3, "weight_decay": 0.1, "foreach": True})
JOBS = {
    "AdamW": PLAIN,
    "accumulation": replace(PLAIN, micro_batches=2),
    "clipping": replace(PLAIN, max_norm=0.5),
    "accumulation, clipping": replace(PLAIN, micro_batches=2, max_norm=0.5),
}


def train(make, job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's loss at each step, and the parameters after the last."""
    contestant = make(job)
    losses = [contestant.step(data(n, dist.get_rank(), job)) for n in range(STEPS)]
    return losses, contestant.parameters()


def data(step: int, rank: int, job: Job) -> list[torch.Tensor]:
    """The micro-batches of one rank at one step: sequences that count up by threes."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    starts = (
        torch.randint(SPEC.vocab_size, (TOKENS[0], 1), generator=draw)
        for _ in range(job.micro_batches)
    )
    return [(start + 3 * torch.arange(TOKENS[1])) % SPEC.vocab_size for start in starts]


def train_all(contestants: dict, jobs: list[str], world_size: int, timeout: float = 300) -> dict:
    """By job and contestant: what `train` gave on each rank."""

    def fn():
        torch.set_num_threads(1)
        return {
            (job, name): train(make, JOBS[job])
            for job, (name, make) in product(jobs, contestants.items())
        }

    results = ranks.run(fn, world_size, timeout=timeout)
    return {key: [result[key] for result in results] for key in results[0]}


def check_equal(results: dict, ours: Iterable[str], peers: Iterable[str]) -> None:
    """All losses on all ranks, and all parameters: each of ours beside each peer."""
    jobs = {job for job, _ in results}
    for job, mine, peer in product(jobs, ours, peers):
        pairs = zip(results[job, mine], results[job, peer], strict=True)
        for rank, (own, other) in enumerate(pairs):
            where = f"{job}: {mine} beside {peer}, rank {rank}: "
            assert_close(own, other, rtol=RTOL, atol=RTOL / 10, msg=partial(add, where))
            assert own[0][-1] < 0.8 * own[0][0], where + "the loss has not fallen"
