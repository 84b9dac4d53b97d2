"""The plan against what PyTorch itself issues on real ranks: counts and bytes of a step.

Each test takes the steady state, a step after the first two. What PyTorch issues beyond the plan
has tests of its own, at the end.
"""

import contextlib
from collections import Counter
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from course_lib import comm, models, ranks, specs  # noqa: E402
from course_lib.specs import Recipe, Strategy  # noqa: E402

# 18 rows, 35, 101: nothing that 2, 3 or 4 ranks divide throughout.
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
DTYPES = {"fp32": torch.float32, "pure-bf16": torch.bfloat16, "fsdp-bf16": torch.float32}
CAP = 8 * 1024  # bytes; of a model of 51 KB


def loss(model, tokens):
    """Through the model's forward, where wrappers have their hooks."""
    return model(tokens).float().logsumexp(-1).mean()


def steps(model, optimizer, grad_accum=1, no_sync=contextlib.nullcontext, count=3):
    """Train; give how many collectives this rank had issued before each step, and at the end."""
    tokens = torch.arange(24).view(2, 12)
    marks = []
    for _ in range(count):
        marks.append(len(ranks.entries()))
        for _ in range(grad_accum - 1):
            with no_sync():
                loss(model, tokens).backward()
        loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*marks, len(ranks.entries())]


def train_ddp(spec, precision, grad_accum, zero=False, **options):
    model = DistributedDataParallel(models.build(spec, dtype=DTYPES[precision]), **options)
    optimizer = torch.optim.SGD
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        optimizer = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
    optimizer = optimizer(model.parameters(), lr=0.1)
    return steps(model, optimizer, grad_accum, model.no_sync)


def train_fsdp(spec, precision, grad_accum, groups, mesh=None, **options):
    model = models.build(spec, dtype=DTYPES[precision])
    if mesh:
        names = ("replicate", "shard")
        options["mesh"] = dist.init_device_mesh("cpu", mesh, mesh_dim_names=names)
    if precision == "fsdp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for modules in groups:
        fully_shard([model.get_submodule(name) for name in modules], **options)
    fully_shard(model, **options)
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1), grad_accum)


def of_step(results, which=-1):
    """What each rank issued in one step: (counts, bytes by kind); all ranks must agree."""
    marks = results[0]
    each = []
    for entries in results.log:
        step = entries[marks[which - 1] : marks[which]] if which < 0 else entries
        counts, nbytes = Counter(), Counter()
        for entry in step:
            counts[entry.kind] += 1
            nbytes[entry.kind] += entry.bytes_per_rank
        each.append((dict(counts), dict(nbytes)))
    assert all(one == each[0] for one in each)
    return each[0]


def predicted(plan):
    return plan.counts(), plan.bytes_by_kind()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("precision, grad_accum", [("fp32", 1), ("fp32", 3), ("pure-bf16", 2)])
def test_ddp(world_size, precision, grad_accum):
    options = {"bucket_cap_mb": CAP / 2**20}
    results = ranks.run(
        lambda: train_ddp(TINY, precision, grad_accum, **options), world_size=world_size
    )
    recipe, strategy = Recipe(precision, grad_accum=grad_accum), Strategy("ddp", world_size)
    plan = comm.step(TINY, recipe, strategy, bucket_bytes=CAP)
    assert of_step(results) == predicted(plan)
    assert plan.count >= 3
    buffers = [entry.collective for entry in results.log[0][results[0][-2] :]]
    assert tuple(buffers) == plan.lines[0].collectives


def test_ddp_with_its_own_caps():
    """lab-25m: a head above the first bucket's 1 MiB, blocks that fill three of 25 MiB."""
    lab = specs.model("lab-25m")
    results = ranks.run(lambda: train_ddp(lab, "fp32", 1), world_size=2)
    plan = comm.step(lab, Recipe("fp32"), Strategy("ddp", 2))
    assert of_step(results) == predicted(plan)
    assert plan.counts() == {"all_reduce": 4}


def test_ddp_counts_a_tied_embedding_once():
    options = {"bucket_cap_mb": CAP / 2**20}
    results = ranks.run(lambda: train_ddp(TIED, "fp32", 1, **options), world_size=2)
    plan = comm.step(TIED, Recipe("fp32"), Strategy("ddp", 2), bucket_bytes=CAP)
    assert of_step(results) == predicted(plan)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_zero_redundancy_optimizer(world_size):
    results = ranks.run(lambda: train_ddp(TINY, "fp32", 2, zero=True), world_size=world_size)
    plan = comm.zero_redundancy(TINY, Recipe("fp32", grad_accum=2), world_size)
    assert of_step(results) == predicted(plan)
    step = results.log[0][results[0][-2] :]
    sent = [(entry.collective, entry.peer) for entry in step if entry.kind == "broadcast"]
    assert tuple(collective for collective, _ in sent) == plan.lines[1].collectives
    sizes = [tensor.numel for tensor in TINY.tensors()]
    assert [peer for _, peer in sent] == sorted(comm.owners(sizes, world_size))


LAYERS = [[f"model.layers.{layer}"] for layer in range(3)]
PAIRS = [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.layers.2"]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("precision, grad_accum", [("fp32", 1), ("pure-bf16", 2), ("fsdp-bf16", 3)])
def test_fsdp_by_layer(world_size, precision, grad_accum):
    results = ranks.run(
        lambda: train_fsdp(TINY, precision, grad_accum, LAYERS), world_size=world_size
    )
    recipe = Recipe(precision, grad_accum=grad_accum)
    assert of_step(results) == predicted(comm.step(TINY, recipe, Strategy("fsdp", world_size)))


@pytest.mark.parametrize(
    "groups, strategy",
    [
        ([], Strategy("fsdp", 4, wrap="model")),
        (PAIRS, Strategy("fsdp", 4, wrap="4000-params")),
        (LAYERS, Strategy("fsdp", 4, reshard_after_forward=False)),
        ([], Strategy("fsdp", 4, wrap="model", reshard_after_forward=False)),
    ],
    ids=["model", "4000-params", "layers kept", "model kept"],
)
def test_fsdp_otherwise(groups, strategy):
    options = {} if strategy.reshard_after_forward else {"reshard_after_forward": False}
    results = ranks.run(lambda: train_fsdp(TINY, "fp32", 2, groups, **options), world_size=4)
    plan = comm.step(TINY, Recipe("fp32", grad_accum=2), strategy)
    assert of_step(results) == predicted(plan)


@pytest.mark.parametrize("nodes, gpus_per_node", [(2, 2), (1, 3), (2, 1)])
def test_hsdp(nodes, gpus_per_node):
    gpus, mesh = nodes * gpus_per_node, (nodes, gpus_per_node)
    results = ranks.run(
        lambda: train_fsdp(TINY, "fp32", 2, LAYERS, mesh), world_size=gpus
    )
    strategy = Strategy("hsdp", gpus, gpus_per_node)
    counts, nbytes = predicted(comm.step(TINY, Recipe("fp32", grad_accum=2), strategy))
    if gpus_per_node == 1:  # fully_shard leaves out what has one rank
        counts = {"all_reduce": counts["all_reduce"]}
        assert nbytes.pop("all_gather") == nbytes.pop("reduce_scatter") == 0
    assert of_step(results) == (counts, nbytes)
