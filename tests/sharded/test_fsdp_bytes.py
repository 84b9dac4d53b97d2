"""FSDP's bytes and collectives are those of the ledgers."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import and_

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero_cases import (
    EVEN,
    TIED,
    UNEVEN,
    Job,
    account,
    one_thread,  # noqa: F401 (a fixture)
)

from course_lib import comm, ledger, models, ranks
from course_lib.measure import LiveBytes
from course_lib.sharded.fsdp import FSDP, MixedPrecision
from course_lib.specs import Strategy

LOW = MixedPrecision(param=torch.bfloat16)  # and reduced as such


@dataclass(frozen=True)
class Sharded(Job):
    """A job of `zero_cases`, by FSDP."""

    strategy: str = "fsdp"
    wrap: str = "layer"
    kept: bool = False

    def model(self) -> nn.Module:
        model = models.build(self.spec)
        if self.frozen:
            model.model.layers.requires_grad_(False)
        return model

    def on(self, world_size: int) -> Strategy:
        node = world_size // 2 if self.strategy == "hsdp" else 8
        kept = {"reshard_after_forward": not self.kept}
        return Strategy(self.strategy, world_size, gpus_per_node=node, wrap=self.wrap, **kept)


class Stage:
    """What `account` trains by: FSDP, and an optimizer that is made after it."""

    def __init__(
        self, job: Sharded, model: nn.Module, optimizer_class, bucket_bytes: int, **options
    ) -> None:
        two = (2, dist.get_world_size() // 2)
        self.fsdp = FSDP(
            model,
            [model] if job.wrap == "model" else None,
            mesh=init_device_mesh("cpu", two) if job.strategy == "hsdp" else None,
            reshard_after_forward=not job.kept,
            precision=LOW if job.precision == "fsdp-bf16" else MixedPrecision(),
        )
        self.optimizer = optimizer_class(model.parameters(), **options)
        self.zero_grad = self.optimizer.zero_grad

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.fsdp.clip_grad_norm_(1.0)
        self.optimizer.step()

    def state_tensors(self) -> list[torch.Tensor]:
        return [x for state in self.optimizer.state.values() for x in state.values()]


DEEP = replace(UNEVEN, num_layers=2)
JOBS = {
    "uneven": Sharded(DEEP, micro_batches=2),
    "kept": Sharded(DEEP, kept=True),
    "tied": Sharded(TIED, optimizer="sgd-momentum"),
    "whole model": Sharded(DEEP, wrap="model"),
    "16 bits": Sharded(precision="fsdp-bf16", micro_batches=2),
    "frozen": Sharded(EVEN, optimizer="sgd-momentum", frozen=True),
}
ON_NODES = {
    "replicas": Sharded(strategy="hsdp", micro_batches=2),
    "replicas, 16 bits": Sharded(TIED, "fsdp-bf16", strategy="hsdp"),
}


def check_accounts(jobs: dict[str, Sharded], world_size: int) -> None:
    """The rank with most holds what the ledger says, and no rank holds anything else. Collectives
    are those of the plan, and one for the norm.

    Where blocks are frozen a fraction does not tell the plan which tensors these are.
    """

    def fn():
        torch.set_num_threads(1)
        return {name: account(partial(Stage, job), job) for name, job in jobs.items()}

    results = ranks.run(fn, world_size=world_size, timeout=300)
    for name, job in jobs.items():
        given = job.spec, job.recipe(), job.on(world_size)
        states, plan = ledger.model_states(*given).by_category(), comm.step(*given)
        for rank, result in enumerate(results):
            held, live, start, end = result[name]
            assert live == sum(held.values()), name
            assert all(held[key] <= states[key] for key in states), name
            issued = [entry.collective for entry in results.log[rank][start:end]]
            norm = issued.pop()
            assert (norm.kind, norm.elements, norm.itemsize) == ("all_reduce", 1, 8), name
            if not job.frozen:
                sent = Counter()
                for each in issued:
                    sent[each.kind] += each.bytes_per_rank
                assert sent == plan.bytes_by_kind(), name
                assert Counter(each.kind for each in issued) == plan.counts(), name
        assert states in [result[name][0] for result in results], name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bytes_and_collectives_are_those_of_the_ledger(world_size):
    jobs = {name: job for name, job in JOBS.items() if not (job.frozen and world_size == 3)}
    check_accounts(jobs, world_size)


def test_bytes_and_collectives_of_replicas_are_those_of_the_ledger():
    check_accounts(ON_NODES, world_size=4)


def test_live_bytes_are_told_by_category():
    """In a step: buffers that are gathered and reduced are told as such, and then are gone."""

    def fn():
        torch.set_num_threads(1)
        model = models.build(DEEP)
        FSDP(model)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.arange(24).view(2, 12)
        model.loss(tokens).backward()
        optimizer.step()
        steps = []
        for _ in range(5):
            with LiveBytes(model, optimizer) as live:
                model.loss(tokens).backward()
                optimizer.step()
            for _ in range(8):  # gloo's threads hold the tensors of their last collective
                dist.barrier()
            most = Counter()
            for moment in live.timeline:
                most |= Counter(moment.live)
            steps.append(most)
        # All steps hold as much; where a thread of gloo's lets go late, one seems to hold more.
        return reduce(and_, steps), live.now

    strategy = Strategy("fsdp", 2)
    states = ledger.model_states(DEEP, Job().recipe(), strategy).by_category()
    units = comm.units.units(DEEP, strategy)
    gathered = [4 * 2 * unit.shard for unit in units]
    results = ranks.run(fn, world_size=2)
    assert {name: results[0][1][name] for name in states} == states
    for most, now in results:
        assert now.pop("activations") == 2 * 12 * 8  # the tokens
        assert now.keys() == states.keys()
        assert most["gather_buffers"] == gathered[1]  # one block is on its way
        assert most["reduce_buffers"] >= max(gathered)
        assert most["parameters"] >= now["parameters"] + gathered[0] + gathered[1]
