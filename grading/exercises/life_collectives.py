"""Lesson 08 on ranks, one collective at a time: rows that come together, gradients that are summed.

Each is a `one_rank(answer, job)` for `small_model.on_small_model`.
"""

import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.checks.exercise import Answer
from grading.exercises import sharded_run, small_model


def unsharded(answer: Answer, job: dict) -> dict:
    """`answer(shard, dim)`: what it returned, and what it sent."""
    sharded_run.fill_new_memory()
    torch.manual_seed(job["seed"])
    whole = torch.randn(job["dim"], *job["row"])
    each = -(-job["dim"] // dist.get_world_size())
    first = min(dist.get_rank() * each, job["dim"])
    own = whole[first : first + each].clone()
    del whole
    start = len(ranks.entries())
    found = answer(own, job["dim"])
    sent = sharded_run.collectives(ranks.entries()[start:])
    if isinstance(found, torch.Tensor):
        found = found.detach().double().numpy().round(small_model.DIGITS).tolist()
    return {"values": {"whole": found}, "collectives": sent}


def reduced(answer: Answer, job: dict) -> dict:
    """`answer(gradient)`: what it returned, in which dtype, and what it sent."""
    sharded_run.fill_new_memory()
    torch.manual_seed(1000 * job["seed"] + dist.get_rank())
    start = len(ranks.entries())
    found = answer((1 + torch.rand(dist.get_world_size() * job["size"])).bfloat16())
    sent = sharded_run.collectives(ranks.entries()[start:])
    dtype = str(getattr(found, "dtype", type(found))).removeprefix("torch.")
    if isinstance(found, torch.Tensor):
        found = found.detach().double().numpy().tolist()
    return {"values": {"mean": found, "dtype": dtype}, "collectives": sent}
