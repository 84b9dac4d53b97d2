"""How lesson 05's answers are run: what each rank is given, and what comes back of it.

They stand apart from the answers: whatever stands beside a reference is off limits for a learner's
answer, and so must not be called while one runs.
"""

import functools
import operator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib import ranks
from course_lib.checks.exercise import Case
from course_lib.checks.on_ranks import on_ranks
from grading.exercises import sharded_run

UNEQUAL = "update() must return S elements on every rank; yours differ from rank to rank"
OPTIMIZERS = {
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.1),
}


def padded(tensors, n):
    """As in the lesson: tensors end to end, and zeros up to a multiple of n: [N·S]."""
    flat = parameters_to_vector(tensors).detach()
    return F.pad(flat, (0, -len(flat) % n))


def all_padded(tensors):
    """`padded` for as many ranks as there are."""
    return padded(tensors, dist.get_world_size())


def mine(whole):
    """This rank's part of a flat tensor [N·S]: [S], a view."""
    return whole.view(dist.get_world_size(), -1)[dist.get_rank()]


def gather(model, shard):
    whole = all_padded(model.parameters())
    dist.all_gather_single(whole, shard.detach())
    vector_to_parameters(whole, model.parameters())


def cut(answer, case: Case) -> object:
    """05-partition: the shard, as a list."""
    values, rank, world_size = case.args
    shard = answer(torch.tensor(values), rank, world_size)
    return shard.tolist() if isinstance(shard, torch.Tensor) else shard


def updated(answer, job: dict) -> dict:
    """05-update, on each rank: two steps, after each of which the check gathers the shards."""
    model, batches = sharded_run.built(job)
    run = sharded_run.ShardedRun(model)
    update = answer(model, OPTIMIZERS[job["optimizer"]])
    if not callable(update):
        return {f"the answer must be the function update; yours was {update!r:.80}": {}}
    for batch in batches:
        model.zero_grad()
        model(batch).backward()
        with run.step():
            shard = update()
        sizes = _everyones(shard.numel() if isinstance(shard, torch.Tensor) else -1)
        if not isinstance(shard, torch.Tensor):
            return {f"update() must return this rank's shard; yours returned {shard!r:.80}": {}}
        if len(set(sizes)) > 1:
            return {UNEQUAL: {}}  # whichever they are
        shard = shard.detach().clone()  # what was returned is not kept by us
        if shard.shape != mine(all_padded(model.parameters())).shape:
            break  # there is no telling where it belongs
        gather(model, shard)
    report = run.report({"shard": shard})
    held = report["resident"]
    held["gradients"] = max(held["gradients"], run.size)  # who frees them is right, too
    sent = report["collectives"]
    if "all_reduce" in sent["order"]:  # in whatever pieces
        report["collectives"] = {"order": sent["order"]}
    return report


def _everyones(number: int) -> list[int]:
    """This number of each rank."""
    found = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_single(found, torch.tensor([number]))
    return found.tolist()


def put_together(answer, job: dict) -> dict:
    """05-gather, on each rank: its shard of new values for all parameters; what became of them."""
    model, _ = sharded_run.built(job | {"steps": 0})
    torch.manual_seed(job["seed"])  # the same on all ranks
    shard = mine(all_padded([torch.randn_like(p) for p in model.parameters()])).clone()
    before = list(model.parameters())
    run = sharded_run.ShardedRun(model)
    with run.step():
        answer(model, shard)
    after = list(model.parameters())
    return run.report(dict(model.named_parameters())) | {
        "the parameters are the same objects": all(map(operator.is_, before, after)),
        "the parameters are trained": all(p.requires_grad for p in after),
        "the parameters are": ", ".join({str(p.dtype) for p in after}),
    }


def clipped(answer, case: Case) -> dict[str, object]:
    """05-clip, on each rank, with each max_norm of the case.

    Gives the norm returned, the gradient afterwards, and what was communicated.
    """

    def on_this_rank(gradient, limits):
        found = {}
        for limit in limits["max_norm"]:
            shard, before = gradient.clone(), len(ranks.entries())
            norm = answer(shard, limit)
            sent = sharded_run.collectives(ranks.entries()[before:])
            found[f"max_norm {limit:g}"] = {
                "norm": norm,
                "gradient": shard[:3].tolist(),
                "sent": "numbers alone" if sent["numbers"] and not sent["order"] else sent,
            }
        return found

    return on_ranks(on_this_rank, case)
