"""The plan against what PyTorch itself issues on real ranks: counts and bytes, difference 0.

All jobs of a number of ranks run one after another in one run. What counts is the steady state, the
third step of each; what PyTorch issues beyond the plan has tests of its own, at the end.
"""

import contextlib
from collections import Counter
from functools import cache, partial

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from course_lib import comm, models, ranks, specs  # noqa: E402
from course_lib.specs import Recipe, Strategy  # noqa: E402

# 18, 35 and 101 rows: nothing that 2, 3 and 4 ranks divide throughout.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 18,
    "intermediate_size": 35,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 101,
}
TINY = specs.read_config(CONFIG)
TIED = specs.read_config(CONFIG | {"tie_word_embeddings": True})
LAB = specs.model("lab-25m")
CAP = 8 * 1024  # bytes; TINY's gradients are 47 KiB in fp32
LAYERS = [[f"model.layers.{layer}"] for layer in range(3)]
BY_SIZE = [  # of 1,500 parameters or more, besides those of smaller ones
    *([f"model.layers.{layer}.mlp"] for layer in range(3)),
    ["model.embed_tokens"],
    ["lm_head"],
    ["model"],
]


def build(spec, precision):
    dtype = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    return models.build(spec, dtype=dtype)


def ddp(spec, recipe, zero=False, **options):
    """Train by DDP; see `train` for what comes back."""
    start = len(ranks.entries())
    model = DistributedDataParallel(build(spec, recipe.precision), **options)
    make = torch.optim.SGD
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
    return [start, *train(model, recipe, make, model.no_sync)]


def fsdp(spec, recipe, groups, mesh=None, **options):
    """Train by fully_shard, each of the groups of modules a unit; see `train`."""
    model = build(spec, recipe.precision)
    if mesh:
        names = ("replicate", "shard")
        options["mesh"] = dist.init_device_mesh("cpu", mesh, mesh_dim_names=names)
    if recipe.precision == "fsdp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    start = len(ranks.entries())
    for modules in groups:
        fully_shard([model.get_submodule(name) for name in modules], **options)
    if type(options.get("reshard_after_forward")) is int:  # which it would do to the root, too
        del options["reshard_after_forward"]
    fully_shard(model, **options)
    return [start, *train(model, recipe, torch.optim.SGD, contextlib.nullcontext)]


def train(model, recipe, make_optimizer, no_sync):
    """Take three steps. How many collectives this rank had issued before each, and at the end."""
    tokens = torch.arange(24).view(2, 12)
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    marks = []
    for _ in range(3):
        marks.append(len(ranks.entries()))
        for micro_batch in range(recipe.grad_accum):
            last = micro_batch == recipe.grad_accum - 1
            with contextlib.nullcontext() if last else no_sync():
                model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*marks, len(ranks.entries())]


def recipe(precision="fp32", grad_accum=1):
    return Recipe(precision, grad_accum=grad_accum)


def ddp_job(spec, recipe):
    """What to run, and the plan that it should follow, given the number of ranks."""
    run = partial(ddp, spec, recipe, bucket_cap_mb=CAP / 2**20)
    return run, lambda n: comm.step(spec, recipe, Strategy("ddp", n), bucket_bytes=CAP)


def fsdp_job(recipe, groups, strategy=None, **options):
    strategy = strategy or {}
    run = partial(fsdp, TINY, recipe, groups, **options)
    return run, lambda n: comm.step(TINY, recipe, Strategy("fsdp", n, **strategy))


def hsdp_job(nodes, gpus_per_node):
    run = partial(fsdp, TINY, recipe(grad_accum=2), LAYERS, (nodes, gpus_per_node))
    strategy = Strategy("hsdp", nodes * gpus_per_node, gpus_per_node)
    return run, lambda n: comm.step(TINY, recipe(grad_accum=2), strategy)


KEPT = {"reshard_after_forward": False}
TO_2 = {"reshard_after_forward": 2}
EVERYWHERE = {
    "ddp": ddp_job(TINY, recipe()),
    "ddp, 3 micro-batches": ddp_job(TINY, recipe(grad_accum=3)),
    "ddp, bf16": ddp_job(TINY, recipe("pure-bf16")),
    "ddp, tied": ddp_job(TIED, recipe()),
    "fsdp": fsdp_job(recipe(), LAYERS),
    "fsdp, bf16": fsdp_job(recipe("pure-bf16"), LAYERS),
    "fsdp, fsdp-bf16, 3 micro-batches": fsdp_job(recipe("fsdp-bf16", 3), LAYERS),
    "fsdp, model": fsdp_job(recipe(), [], {"wrap": "model"}),
    "fsdp, 1500-params": fsdp_job(recipe(), BY_SIZE, {"wrap": "1500-params"}),
    "fsdp, kept": fsdp_job(recipe(grad_accum=2), LAYERS, KEPT, **KEPT),
    "zero_redundancy": (
        partial(ddp, TINY, recipe(grad_accum=2), zero=True),
        lambda n: comm.zero_redundancy(TINY, recipe(grad_accum=2), n),
    ),
}
UNUSED = partial(ddp, TINY, recipe(), bucket_cap_mb=CAP / 2**20, find_unused_parameters=True)
JOBS = {
    1: {name: EVERYWHERE[name] for name in ("ddp", "fsdp")},
    2: EVERYWHERE
    | {
        "ddp, lab-25m": (
            partial(ddp, LAB, recipe()),
            lambda n: comm.step(LAB, recipe(), Strategy("ddp", n)),
        ),
        "hsdp, 1 rank a node": hsdp_job(2, 1),
    },
    3: EVERYWHERE | {"hsdp, 1 node": hsdp_job(1, 3)},
    4: EVERYWHERE
    | {
        "hsdp, 2 nodes": hsdp_job(2, 2),
        "fsdp, resharded to 2": fsdp_job(recipe(grad_accum=2), LAYERS, TO_2, **TO_2),
        "ddp, unused": (UNUSED, None),
    },
}
BEYOND = ("ddp, unused", "hsdp, 1 rank a node")  # see the end of this file


@cache
def run_of(world_size):
    """What every job marked on rank 0, and the log of the run."""
    work = {name: job for name, (job, _) in JOBS[world_size].items()}
    results = ranks.run(lambda: {name: job() for name, job in work.items()}, world_size)
    return results[0], results.log


def issued(entries):
    counts, nbytes = Counter(), Counter()
    for entry in entries:
        counts[entry.kind] += 1
        nbytes[entry.kind] += entry.bytes_per_rank
    return dict(counts), dict(nbytes)


def predicted(plan):
    return plan.counts(), plan.bytes_by_kind()


@pytest.mark.parametrize(
    "world_size, name",
    [(n, name) for n in (2, 3, 4) for name in JOBS[n] if name not in BEYOND],
)
def test_a_steady_step(world_size, name):
    plan = JOBS[world_size][name][1](world_size)
    marks, log = run_of(world_size)
    *_, start, end = marks[name]
    assert [issued(entries[start:end]) for entries in log] == [predicted(plan)] * world_size


def steady(name, world_size=4):
    marks, log = run_of(world_size)
    *_, start, end = marks[name]
    return log[0][start:end]


def test_each_bucket_of_ddp_is_the_one_predicted():
    plan = EVERYWHERE["ddp"][1](4)
    assert tuple(entry.collective for entry in steady("ddp")) == plan.lines[0].collectives
    assert plan.count == 5


def test_lab_25m_fills_four_buckets():
    """The head closes the first, of 1 MiB; the blocks and the embedding fill three of 25 MiB."""
    assert len(steady("ddp, lab-25m", 2)) == 4


def test_each_broadcast_comes_from_the_owner_predicted():
    sent = [entry for entry in steady("zero_redundancy") if entry.kind == "broadcast"]
    plan = EVERYWHERE["zero_redundancy"][1](4)
    assert tuple(entry.collective for entry in sent) == plan.lines[1].collectives
    owners = comm.owners([tensor.numel for tensor in TINY.tensors()], 4)
    assert [entry.peer for entry in sent] == sorted(owners)


def test_before_its_first_step_ddp_compares_the_models_and_copies_rank_0s():
    marks, log = run_of(4)
    start, first, *_ = marks["ddp"]
    how_many, shapes, values = (entry.collective for entry in log[0][start:first])
    dimensions = sum(len(tensor.shape) for tensor in TINY.tensors())
    assert how_many == specs.Collective("all_gather", 4, 8, 4)  # parameters of each rank
    assert shapes == specs.Collective("broadcast", 2 * dimensions, 8, 4)  # sizes and strides
    assert values == specs.Collective("broadcast", TINY.parameters, 4, 4)


def test_in_its_first_step_ddp_has_one_bucket():
    marks, log = run_of(4)
    _, first, second, *_ = marks["ddp"]
    plan = comm.step(TINY, recipe(), Strategy("ddp", 4), bucket_bytes=CAP, first_step=True)
    assert issued(log[0][first:second]) == predicted(plan)
    assert plan.bytes_by_kind() == {"all_reduce": 2 * 3 * TINY.parameters // 4 * 4}


def test_in_its_second_step_ddp_agrees_on_its_new_buckets():
    """Rank 0 tells the others which tensors go into which: numbers of 4 bytes."""
    marks, log = run_of(4)
    _, _, second, third, _ = marks["ddp"]
    tensors, sizes, *rest = (entry.collective for entry in log[0][second:third])
    plan = EVERYWHERE["ddp"][1](4)
    assert tensors == specs.Collective("broadcast", len(TINY.tensors()) + 1, 4, 4)
    assert sizes == specs.Collective("broadcast", plan.count, 4, 4)
    assert tuple(rest) == plan.lines[0].collectives


def test_looking_for_unused_parameters_costs_a_number_for_each_tensor():
    """Each rank says which tensors it used, 4 bytes for each, in one more all_reduce a step."""
    *gradients, used = (entry.collective for entry in steady("ddp, unused"))
    assert used == specs.Collective("all_reduce", len(TINY.tensors()), 4, 4)
    assert sum(each.elements for each in gradients) == TINY.parameters


def test_fsdp_issues_nothing_before_its_first_step_nor_more_in_it():
    marks, log = run_of(4)
    start, first, second, third, end = marks["fsdp"]
    assert start == first
    assert issued(log[0][first:second]) == issued(log[0][third:end])


def test_at_one_rank_ddp_issues_what_moves_nothing_and_fsdp_nothing():
    plan = EVERYWHERE["ddp"][1](1)
    assert issued(steady("ddp", 1)) == predicted(plan) == ({"all_reduce": 5}, {"all_reduce": 0})
    assert issued(steady("fsdp", 1)) == ({}, {})
    assert EVERYWHERE["fsdp"][1](1).bytes_per_rank == 0


def test_at_one_rank_of_a_node_hsdp_only_all_reduces():
    """fully_shard leaves out a group of one rank; the plan lists its collectives, of 0 bytes."""
    counts, nbytes = predicted(JOBS[2]["hsdp, 1 rank a node"][1](2))
    assert nbytes == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": nbytes["all_reduce"]}
    only = {"all_reduce": counts["all_reduce"]}, {"all_reduce": nbytes["all_reduce"]}
    assert issued(steady("hsdp, 1 rank a node", 2)) == only
