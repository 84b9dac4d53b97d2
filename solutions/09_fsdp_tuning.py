# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 09 · FSDP tuning
#
# After this lesson you can
# - choose units: too coarse keeps too much, too fine cuts communication into crumbs;
# - say what gathering ahead buys, and measure communication that nothing hides;
# - order checkpoint and unit: two all_gathers or three;
# - price CPU offload, and the two levels of hybrid sharding (HSDP).
#
# At the end you have turned each of these from end to end, with bytes and time, on a link that is
# slow enough to matter.
#
# Time: 45 to 90 minutes.

# %%
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh

from course_lib import comm, explorers, measure, models, ranks, specs
from course_lib.checks import check
from course_lib.figures.sweep import Setting, lanes, sweep, uncovered
from course_lib.models.llama import Attention, Block, Decoder, SwiGLU
from course_lib.ranks.log import CollectiveLog
from course_lib.ranks.slow_link import slow_link
from course_lib.sharded import wrapping
from course_lib.sharded.fsdp import FSDP
from course_lib.sharded.norm import global_norm

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# ## Play first
#
# A block of Llama 3 8B has 416 MiB in bf16. On 64 ranks, over InfiniBand: is its all_gather a
# matter of latency, or of bytes? And that of one Linear in it, 32 MiB? Of a norm, 8 KiB? Guess,
# then move the size. From where down does it pay no more to cut smaller?

# %% tags=["explorer", "nbval-ignore-output"]
explorers.network_price("all_gather", size=512 * 2**20, ranks=64, network="InfiniBand NDR")

# %% [markdown]
# ## Units: as coarse as fits
#
# A unit is gathered as one, so
#
# - **whole at a time** are 1 + ahead units, the one that computes and those on their way;
# - **collectives** in a step are three for each unit: gathered for forward, gathered for backward,
#   gradients reduced.
#
# Coarser units: more memory, fewer messages. The bytes that travel are the same. So with g blocks
# to a unit: (1 + ahead) · g blocks whole, and 3 L / g collectives for L blocks.
#
# ### Exercise 09-units: As coarse as fits (3 points)


# %% exercise="09-units"
def choose(block, blocks, ahead, budget):
    """How many blocks to put into a unit, such that it fits, with as few collectives as can be.

    block: bytes of a block's parameters, whole. blocks: how many there are; all units have as many.
    ahead: while a unit computes, this many of the next ones are whole, too, if there are so many.
    budget: bytes that there are for what is whole at a time. One block to a unit fits.
    Returns {"blocks": of a unit, "collectives": of a step with one micro-batch}. For 12 blocks of
    100 bytes, one ahead and a budget of 700: 3 (whole: 600), and 4 units have 12 collectives.
    """

    ### BEGIN SOLUTION
    def fits(g):
        return min((1 + ahead) * g, blocks) * block <= budget

    most = max(g for g in range(1, blocks + 1) if blocks % g == 0 and fits(g))
    return {"blocks": most, "collectives": 3 * blocks // most}
    ### END SOLUTION


# %% check="09-units"
check("09-units", choose)

# %% [markdown]
# For Llama 3 8B on 64 GPUs, 8 to a node, over InfiniBand NDR; one unit ahead:

# %%
llama = specs.model("llama3-8b")
block = sum(tensor.numel for tensor in llama.tensors() if tensor.layer == 0)
net = comm.Topology.of(specs.Cluster(64))
for g in (32, 8, 4, 2, 1, 1 / 7):
    units = round(32 / g)
    gather = specs.Collective("all_gather", round(g * block), 2, ranks=64)
    whole, seconds = 2 * min(2, units) * round(g * block), 3 * units * net.seconds(gather)
    print(
        f"{g:5.2f} to a unit: whole {specs.human(whole):>10}, {3 * units:3} collectives, "
        f"{seconds:.2f} s on the link"
    )

# %% [markdown]
# From the model to blocks memory falls by 16, and the link is busy for a third longer. Seven units
# to a block, about one for each Linear, save little more, and take twice as long again: crumbs. So
# blocks are what everybody begins with. Smaller models, more ranks and slower links make crumbs of
# these, too.

# %% [markdown]
# ## Units by size
#
# Blocks are a choice by class. Where a model has no such class, choose by size: **the smallest
# modules that have enough parameters**, from the inside out. What is too small is left to the
# module around it; what is in an inner unit no longer counts.
#
# A ModuleList is never called, so nothing would gather it: it is no unit. The model itself is the
# root unit in any case.
#
# ### Exercise 09-wrap: Units by size (3 points)


# %% exercise="09-wrap"
def auto_wrap(model, least):
    """Choose units by size.

    model: an nn.Module, whose parameters are each in one place. least: int, parameters.
    Returns a list of modules inside of model, in any order: of the innermost to the outermost each
    that has `least` parameters or more, besides those in units within it. No nn.ModuleList, and
    not the model. Where a has b (10) and c (4), and d has 3, beside a: with least 10 it is [b].
    """
    ### BEGIN SOLUTION
    units = []

    def left(module):
        rest = sum(p.numel() for p in module.parameters(recurse=False))
        rest += sum(left(child) for child in module.children())
        if rest < least or module is model or isinstance(module, nn.ModuleList):
            return rest
        units.append(module)
        return 0

    left(model)
    return units
    ### END SOLUTION


# %% check="09-wrap"
check("09-wrap", auto_wrap)

# %% [markdown]
# This lesson's model, and the library's policy with more and more asked of a unit:

# %%
lab = replace(specs.model("lab-25m"), name="lab-3m", vocab_size=512, hidden_size=192)
lab = replace(lab, num_layers=6, num_heads=6, num_kv_heads=6, head_dim=32, intermediate_size=528)
tokens = torch.randint(lab.vocab_size, (8, 57), generator=torch.Generator().manual_seed(0))
P, MIB = lab.parameters, 2**20
model = models.build(lab)
for least in (30_000, 95_000, 120_000, 300_000, 450_000, 2_000_000):
    kinds = [type(module).__name__ for module in wrapping.by_size(model, least)]
    print(f"least {least:9,}:", {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})

# %% [markdown]
# Look at 300,000: a SwiGLU is a unit (304,128). What is left of a block, its attention (147,456), is
# too small, and goes up: to a unit of the whole Decoder, with all the attentions in it. Coarse by
# accident, where a little more or less asked would not be. Such policies hang on details: print
# what yours has chosen.
#
# ## Who is sent for when
#
# A rank computes with a unit only when it is there. So the next ones are sent for before: in
# forward in the order of the last forward, in backward in the reverse. `prefetch` says how many.
#
# ### Exercise 09-order: Who is sent for when (3 points)


# %% exercise="09-order"
def backward(forward, prefetch):
    """What is issued in backward, in order.

    forward: list of str, units in the order in which forward used them; all have been freed.
    prefetch: int, 0 or more. Backward comes to the units in the reverse order. It gathers a unit
    that nobody has sent for, then sends for the next `prefetch` ones that nobody has sent for, then
    computes.
    Returns a list of str. For ["a", "b", "c"] and 1: ["gather c", "gather b", "compute c",
    "gather a", "compute b", "compute a"].
    """
    ### BEGIN SOLUTION
    order, events = forward[::-1], []
    for i, unit in enumerate(order):
        for each in order[i : i + 1 + prefetch]:
            if f"gather {each}" not in events:
                events.append(f"gather {each}")
        events.append(f"compute {unit}")
    return events
    ### END SOLUTION


# %% check="09-order"
check("09-order", backward)

# %% [markdown]
# Each unit ahead is one more whole unit, so there is a second limit, on **gathers in flight**:
# units that have been sent for and not yet arrived. On a GPU it also keeps the CPU, which issues
# long before the GPU computes, from allocating the whole model (FSDP1's `limit_all_gathers`).
#
# ## Exposed communication
#
# Communication costs time only where a rank stands still for it. From a recording of when what was
# on the link, and when the rank computed: which seconds of the first are in none of the second?
#
# ### Exercise 09-exposed: Exposed communication (4 points)


# %% exercise="09-exposed"
def exposed(communication, compute):
    """Seconds in which something is on the link and this rank computes nothing.

    communication, compute: lists of pairs [start, end] in seconds, in any order. Several may be
    under way at the same time, in either.
    Returns a float. For [[0, 4], [2, 6]] and [[3, 5]]: from 0 to 3 and from 5 to 6, so 4.
    """
    ### BEGIN SOLUTION
    cuts = sorted({time for span in [*communication, *compute] for time in span})
    seconds = 0.0
    for i in range(len(cuts) - 1):
        start, end = cuts[i], cuts[i + 1]
        sending = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        if sending and not computing:
            seconds += end - start
    return seconds
    ### END SOLUTION


# %% check="09-exposed"
check("09-exposed", exposed)

# %% [markdown]
# ## A slow link
#
# Our ranks talk through this machine's memory, which is too fast to leave anything exposed. So we
# slow it: inside of `slow_link` a collective is done when it is, but not before a link of its own
# would have carried it. Each rank has one such link, for one collective after another:
#
# latency + bytes per rank / bandwidth
#
# A rank that waits sleeps, and leaves the processor to others. One that computes goes on.

# %%
LINK = {"bandwidth": 110e6, "latency": 1.5e-3}  # bytes a second; seconds for each collective


def both_links():
    shard = torch.ones(500_000)  # 2 MB; both ranks' together: 4 MB
    seconds = []
    for link in (nullcontext(), slow_link(**LINK)):
        with link:
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather_single(torch.empty(2 * len(shard)), shard)
            seconds.append(time.perf_counter() - start)
    return seconds


# %% tags=["nbval-ignore-output"]
own, slow = ranks.run(both_links, world_size=2)[0]
due = LINK["latency"] + 2e6 / LINK["bandwidth"]  # its own part need not travel
print(
    f"4 MB gathered: own link {1e3 * own:.1f} ms, slow link {1e3 * slow:.1f}, due {1e3 * due:.1f}"
)

# %% [markdown]
# ## The job
#
# One way to train the small Llama under FSDP, with one thing turned, on two ranks. Units are chosen
# by class.


# %%
CLASSES = {
    "the Decoder": (Decoder,),  # embedding and all blocks
    "a block": (Block,),
    "half a block": (Attention, SwiGLU),
    "a Linear": (nn.Linear,),
}


def built(wrap):
    """The model and its units: of `wrap` each, and the root."""
    model = models.build(lab)
    return model, wrapping.by_class(model, *CLASSES[wrap]) if wrap in CLASSES else []


# %% [markdown]
# A checkpoint *inside* of the unit: the unit is a module whose forward is checkpointed. *Outside*:
# the checkpointed function calls the unit.


# %%
def checkpointed(model, where):
    """Checkpoint each block, and return the units."""
    layers = model.model.layers
    for i, block in enumerate(layers):
        layers[i] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)
    return (
        list(layers) if where == "inside" else [each._checkpoint_wrapped_module for each in layers]
    )


class Job:
    """`step()` trains on this rank's share of eight sequences of 57; all else is FSDP's."""

    def __init__(self, wrap="a block", checkpoint=None, mesh=None, **tuning):
        self.model, units = built(wrap)
        if checkpoint:
            units = checkpointed(self.model, checkpoint)
        mesh = mesh and init_device_mesh("cpu", mesh)
        self.fsdp = FSDP(self.model, units, mesh=mesh, **tuning)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self):
        loss = self.model.loss(tokens[dist.get_rank() :: dist.get_world_size()])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


# %% [markdown]
# And one way to compare: all settings side by side, in one run and in turns, on both links. `lanes`
# reads communication and compute out of FSDP's events; `uncovered` is your exercise.


# %%
def timed(job):
    """Seconds of a step, and of these the exposed ones."""
    dist.barrier()
    start = time.perf_counter()
    with job.fsdp.recording() as events:
        job.step()
    return time.perf_counter() - start, uncovered(*lanes(events))


def compared(settings, slow=LINK, steps=3):
    """Of each setting: its loss, its log, its peak, and steps on both links."""
    jobs = {name: Job(**setting) for name, setting in settings.items()}
    found = {name: {"own": [], "slow": [], "loss": job.step()} for name, job in jobs.items()}
    for name, job in jobs.items():
        start = len(ranks.entries())
        with measure.LiveBytes(job.model, job.optimizer) as live:
            job.step()
        found[name] |= {"log": (start, len(ranks.entries())), "peak": live.peak.total}
        found[name]["held"] = measure.model_state_bytes(job.model, job.optimizer)
    for link, on, times in (("own", nullcontext(), 1), ("slow", slow_link(**slow), steps)):
        with on:
            for name in times * list(jobs):
                found[name][link].append(timed(jobs[name]))
    return found


# %% [markdown]
# What the ledger says of each: collectives and bytes from `comm.step`, the peak from one process's
# `work` (lesson 07).


# %%
RECIPE, FSDP2 = specs.Recipe("fp32"), specs.Strategy("fsdp", gpus=2)


def sent(run, name):
    """One step's log: how many collectives of each kind, and bytes per rank."""
    log = CollectiveLog(
        entries[slice(*found[name]["log"])] for entries, found in zip(run.log, run, strict=True)
    )
    return log.counts(), log.bytes()


# %%
@cache
def recorded(checkpoint, gpus):
    """What a rank's micro-batch does in one process, and where the blocks are."""
    model, units = built("a block")
    units = checkpointed(model, checkpoint) if checkpoint else units
    names = {module: name for name, module in model.named_modules()}
    events = measure.work(model, lambda: model.loss(tokens[::gpus]))
    return events, [names[unit] for unit in units]


def predicted(wrap="a block", checkpoint=None, strategy=FSDP2, **tuning):
    """The peak, in bytes."""
    events, units = recorded(checkpoint, strategy.gpus)
    units = units if wrap == "a block" else named(wrap)
    return measure.predicted_peak(events, lab, RECIPE, strategy, units=units, **tuning).bytes


def named(wrap):
    """The units of a wrap, by name."""
    model, units = built(wrap)
    return [name for name, module in model.named_modules() if module in units]


def middle(steps):
    """The step of median time: its seconds, and the exposed ones."""
    return sorted(steps)[len(steps) // 2]


# %% [markdown]
# ## Run: units from the whole model to every Linear
#
# Five ways to cut the same model. Predict: the peak, from left to right? The time on the slow link?


# %%
WRAPS = ("the model", *CLASSES)
wrapped = ranks.run(
    compared, args=({wrap: {"wrap": wrap} for wrap in WRAPS},), world_size=2, timeout=300
)
print("losses:", {round(found["loss"], 4) for found in wrapped[0].values()})
due, moved = {}, {}
for wrap in WRAPS:
    counts, nbytes = sent(wrapped, wrap)
    many, moved[wrap] = sum(counts.values()), sum(nbytes.values())
    busy = many * LINK["latency"] + moved[wrap] / LINK["bandwidth"]
    print(f"{wrap:13}{counts}, {moved[wrap] / P:.2f} bytes each; slow link {1e3 * busy:3.0f} ms")
    due[wrap] = comm.step(lab, RECIPE, FSDP2, by_hand=named(wrap)).bytes_per_rank
measure.receipt("one step, sent by each rank", due, moved)

# %% [markdown]
# The bytes are about the same, but for the first: a root unit is not gathered again, so 2P for what
# it has, and 3P for all else. (A P through our ring of two is 1/2 · 4 = 2 bytes for each parameter.)
# Of collectives there are two, or 131; so on the slow link latency grows from nothing to more than
# the bytes take.

# %% tags=["nbval-ignore-output"]
known = {wrap: predicted(wrap) for wrap in WRAPS}


def settings(run, peaks):
    """What rank 0 found, for the figure."""
    return [
        Setting(name, x["peak"], *middle(x["slow"]), middle(x["own"])[0], peaks[name])
        for name, x in run[0].items()
    ]


alt = "From the Decoder to every Linear the peak falls, and the time of a step is a U."
sweep("a unit is", settings(wrapped, known), alt)

# %% [markdown]
# **Too coarse** (the Decoder): it has to be there before anything computes, in forward and again in
# backward, and its gradients are reduced after: nothing hides, and all is whole at once. The whole
# model hides no more; as the root it only saves the third gather.
#
# **Too fine** (right): 131 collectives, 1.5 ms of latency each, whatever they carry, one after
# another; and there is too little compute in a unit to hide the next one's. The machine's own link
# shows a price, too: hooks, copies, waiting.
#
# Memory has no U: from the Decoder on it falls, by less and less. Most of what is left are
# activations, on so small a model.

# %% [markdown]
# *How to read the times.* Two ranks, so that each has a processor of its own even on a small machine,
# as each has a GPU on a large one. Shown is the middle of three steps. If something else runs here,
# times spread: run the cell again before you believe a difference.

# %% [markdown]
# ## Run: gathering ahead
#
# Now the units are blocks, and `prefetch` goes from 0 to 3. And the last once more, with one gather
# in flight at most. Predict: how much of the exposed time does the first unit ahead save? How much
# the third? What does each cost in memory?

# %% tags=["nbval-ignore-output"]
DEPTHS = {
    str(n): {"forward_prefetch": n, "backward_prefetch": n, "gathers": max(n, 1)} for n in range(4)
}
DEPTHS["3, one in flight"] = DEPTHS["3"] | {"gathers": 1}
ahead = ranks.run(compared, args=(DEPTHS,), world_size=2, timeout=300)
known = {
    name: predicted(prefetch=x["forward_prefetch"], gathers=x["gathers"])
    for name, x in DEPTHS.items()
}
alt = "Units gathered ahead, from none to three: the peak rises with each."
sweep("units ahead", settings(ahead, known), alt)

# %% [markdown]
# One ahead is nearly all there is to have: it keeps the link busy while the rank computes. From
# there on the link itself is the limit, or there is no more to hide. Each further unit costs
# memory: a whole block. It helps where units differ much in size or in time.
#
# The bytes? They are the same for all. Prefetching changes *when*.

# %%
plan = comm.step(lab, RECIPE, FSDP2)
for name in DEPTHS:
    counts, nbytes = sent(ahead, name)
    print(f"{name}: as the ledger has it:", counts == plan.counts(), nbytes == plan.bytes_by_kind())

# %% [markdown]
# ## Checkpoint and unit: who is inside of whom?
#
# An activation checkpoint drops a block's activations, and computes its forward again in backward.
# For that it needs the parameters. Which it finds depends on the order.
#
# **Inside** of the unit: backward comes to the unit, its hooks gather; then the checkpoint
# recomputes, behind the hooks' back; then backward; then it is freed. Two gathers, as without.
#
# **Outside**: the checkpoint calls the unit, hooks and all. To them it is a forward like any other:
# gather, compute, *free*. And backward, right after, gathers a third time. Unless the hooks see
# that it is backward's forward, and leave the unit whole.
#
# ### Exercise 09-checkpoint: Two gathers or three (3 points)


# %% exercise="09-checkpoint"
def count(order, recompute_frees, blocks, micro_batches):
    """Gathers and forwards of one step, where each of the blocks is a unit.

    order: "none" (no checkpoint), "inside" (of the unit) or "outside". recompute_frees: bool: do a
    unit's hooks free it after a forward that recomputes, as after any other? The root unit has no
    checkpoint, and is not freed between forward and backward.
    Returns {"all_gathers": of all units, the root among them, "forwards": of blocks}. For "none",
    True, 2 blocks and 1 micro-batch: 5 and 2.
    """
    ### BEGIN SOLUTION
    third = order == "outside" and recompute_frees
    gathers = 1 + blocks * (3 if third else 2)
    forwards = blocks * (1 if order == "none" else 2)
    return {"all_gathers": micro_batches * gathers, "forwards": micro_batches * forwards}
    ### END SOLUTION


# %% check="09-checkpoint"
check("09-checkpoint", count)

# %% [markdown]
# ## Run: three orders
#
# `recompute_reshards=True` is the third: it frees after recomputing, as FSDP1 does.

# %% tags=["nbval-ignore-output"]
ORDERS = {
    "no checkpoint": {},
    "inside": {"checkpoint": "inside"},
    "outside": {"checkpoint": "outside"},
    "outside, frees": {"checkpoint": "outside", "recompute_reshards": True},
}
ordered = ranks.run(compared, args=(ORDERS, LINK, 1), world_size=2, timeout=300)
known = {name: predicted(**setting) for name, setting in ORDERS.items()}
alt = "Without a checkpoint the peak is highest; with one it is the same in all three orders."
sweep("checkpoint", settings(ordered, known), alt)

# %%
print("losses:", {round(found["loss"], 4) for found in ordered[0].values()})
for name in ORDERS:
    plan = comm.step(lab, RECIPE, FSDP2, recompute_gathers="frees" in name)
    counts, nbytes = sent(ordered, name)
    agree = counts == plan.counts() and nbytes == plan.bytes_by_kind()
    print(f"{name:15}{counts}, {sum(nbytes.values()) / P:.2f} bytes each; ledger agrees: {agree}")

# %% [markdown]
# Two or three all_gathers for each of six blocks, and one for the root. What does PyTorch do?
# "Three all-gathers per layer" is often told of FSDP. Ask it.

# %%
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


# %%
def all_gathers(api, where):
    """How many PyTorch issues in a second step."""
    model = models.build(lab)
    units = checkpointed(model, where)
    if api == "fully_shard":
        mesh = init_device_mesh("cpu", (2,))
        for unit in [*units, model]:
            fully_shard(unit, mesh=mesh)
    else:
        policy = ModuleWrapPolicy({Block if where == "outside" else CheckpointWrapper})
        model = FSDP1(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    for _ in range(2):
        start = len(ranks.entries())
        logits = model(tokens[:2, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:2, 1:].flatten()).backward()
    return sum(entry.kind == "all_gather" for entry in ranks.entries()[start:])


# %%
def of_pytorch():
    asked = [(api, where) for api in ("fully_shard", "FSDP1") for where in ("inside", "outside")]
    return {each: all_gathers(*each) for each in asked}


for (api, where), gathers in ranks.run(of_pytorch, world_size=2)[0].items():
    print(f"{api}, checkpoint {where}: {gathers} all_gathers")

# %% [markdown]
# So it is true of FSDP1 with a reentrant checkpoint outside. PyTorch's `fully_shard` leaves the
# unit whole after recomputing: two, in either order. To have the checkpoint inside is right with
# both.
#
# ## CPU offload: the bill
#
# Shards of parameters, gradients and optimizer states live in the host's memory. The GPU is nearly
# empty. The step pays three times:
#
# - shards go **to the device**, before each gather: 4 bytes (fp32; cast there);
# - gradients' shards go **to the host**, after each reduction: 4 bytes;
# - the **update** runs on the host: AdamW reads weight, gradient and two moments, and writes three
#   of them: 28 bytes for each element, at the pace of its memory.
#
# ### Exercise 09-offload: The bill for offloading (3 points)


# %% exercise="09-offload"
def bill(root, blocks, ranks, micro_batches, pcie, memory):
    """Seconds that a rank spends for offloading in one step.

    root, blocks: ints, elements of the root unit, and of all other units together; ranks divides
    both. All are trained. The root is gathered once in a micro-batch, the others twice.
    pcie: bytes a second, in each direction. memory: bytes a second of the host's memory, for this
    rank.
    Returns {"to_device": …, "to_host": …, "update": …}. For 400, 1600, 4 ranks, 1 micro-batch, 100
    and 200: 36.0, 20.0 and 70.0.
    """
    ### BEGIN SOLUTION
    gathered, trained = (root + 2 * blocks) / ranks, (root + blocks) / ranks
    return {
        "to_device": micro_batches * 4 * gathered / pcie,
        "to_host": micro_batches * 4 * trained / pcie,
        "update": 28 * trained / memory,
    }
    ### END SOLUTION


# %% check="09-offload"
check("09-offload", bill)

# %% [markdown]
# Llama 3 8B in numbers: PCIe 5, 63 GB/s each way; a host's 400 GB/s shared by eight ranks; against
# what the GPU computes with 8,192 tokens a rank.

# %%
H100, pcie = specs.gpu("h100-sxm-80"), specs.link("pcie5-x16").gb_s * 1e9
computes = 6 * llama.parameters * 8192 / (H100.matmul_tflops * 1e12)
print(f"the GPU computes for {computes:.2f} s")
for gpus in (8, 64, 512):
    shard = llama.parameters // gpus
    moves, updates = 3 * 4 * shard / pcie, 28 * shard / 50e9
    saved = specs.human(16 * shard)
    print(f"{gpus:3} GPUs: PCIe {moves:.2f} s, update {updates:.2f} s; the GPU is rid of {saved}")

# %% [markdown]
# On 8 GPUs offloading more than doubles the step, and with fewer tokens a step is many times as
# long: that is the "3 to 10 times slower". And mostly it is the update, not PCIe. On 512 GPUs
# it costs little, and saves nothing: there was a quarter of a GiB.
#
# ## Run: offload on and off
#
# Here the "device" is the CPU as well. So the copies are real, and the time of PCIe is not.


# %%
def crossed():
    """Bytes that went to the device, and to the host, in one step."""
    job = Job(offload=True)
    with job.fsdp.recording() as events:
        job.step()
    kinds = ("to device", "to host")
    return {kind: sum(e.bytes for e in events if e.kind == kind) for kind in kinds}


cut = comm.units.units(lab, FSDP2)
root, rest = cut[0].shard, sum(unit.shard for unit in cut[1:])
due = {"to device": 4 * (root + 2 * rest), "to host": 4 * (root + rest)}
measure.receipt("offloaded, each rank, one step", due, ranks.run(crossed, world_size=2)[0])

# %% tags=["nbval-ignore-output"]
PLACES = {"on the device": {}, "offloaded": {"offload": True}}
placed = ranks.run(compared, args=(PLACES, LINK, 1), world_size=2, timeout=300)
offloading = replace(FSDP2, offload="all")
known = {"on the device": predicted(), "offloaded": predicted(strategy=offloading, host=True)}
alt = "Both have about the same peak, as the host's memory counts, too."
sweep("shards are", settings(placed, known), alt)

# %% [markdown]
# The peak counts both sides, as both are this machine's memory. Of it the device would have:

# %%
on_device = specs.human(predicted(strategy=offloading))
print(f"predicted on the device alone: {on_device}, in place of {specs.human(predicted())}")

# %% [markdown]
# ## HSDP: two levels
#
# Links within a node are fast, those between nodes slow. FSDP over all ranks sends 3P over the slow
# ones. **HSDP** shards within a node, and replicates over nodes. On a mesh [replicas, shards]:
#
# - within the node all_gather, all_gather, reduce_scatter: three times (S-1)/S of all parameters;
# - between nodes an all_reduce of *a shard*: twice (R-1)/R of 1/S.
#
# The price is memory: 16P/S, not 16P/(R·S).
#
# And the **norm**: each rank has the squares of its own shard. Replicas have the same.
#
# ### Exercise 09-hsdp: Two levels (3 points)


# %% exercise="09-hsdp"
def hsdp(elements, replicas, shards, itemsize, squares):
    """What a rank sends in a micro-batch on each kind of link, and the gradient's norm.

    elements: int, parameters, all trained, all in units that are freed after forward; replicas *
    shards divides them. itemsize: bytes of one, for parameters and gradients alike.
    squares: list of floats, one for each rank: the sum of squares of its shard of the mean
    gradient. Ranks 0 to shards - 1 are the first node, and so on.
    Returns {"within": bytes, "between": bytes, "norm": float}. For 160, 2, 4, 2 and
    [9., 0., 4., 3., 9., 0., 4., 3.]: 720, 80 and 4.0.
    """
    ### BEGIN SOLUTION
    shard = elements // shards * itemsize
    return {
        "within": 3 * (shards - 1) * shard,
        "between": 2 * (replicas - 1) * shard // replicas,
        "norm": sum(squares[:shards]) ** 0.5,
    }
    ### END SOLUTION


# %% check="09-hsdp"
check("09-hsdp", hsdp)

# %% [markdown]
# ## Run: shapes of a mesh
#
# Four ranks, as two nodes of two. Now the slow link is the one *between* nodes, and slower than
# before; within a node ranks are as fast as ever. Three shapes, replicas x shards. Predict: which
# sends least between nodes?

# %%
BETWEEN = {"bandwidth": 40e6, "latency": 1.5e-3, "node": 2}  # ranks 0 and 1 are a node
SHAPES = {"4x1": {"mesh": (4, 1)}, "2x2": {"mesh": (2, 2)}, "1x4": {"mesh": (1, 4)}}
shaped = ranks.run(compared, args=(SHAPES, BETWEEN, 1), timeout=300)
print("losses:", {round(found["loss"], 4) for found in shaped[0].values()})
for name, setting in SHAPES.items():
    strategy = specs.Strategy("hsdp", gpus=4, gpus_per_node=setting["mesh"][1])
    agree = sent(shaped, name)[1] == comm.step(lab, RECIPE, strategy).bytes_by_kind()
    entries = shaped.log[0][slice(*shaped[0][name]["log"])]
    between = sum(e.bytes_per_rank for e in entries if len({r // 2 for r in e.members}) == 2)
    total = sum(e.bytes_per_rank for e in entries)
    print(f"{name}: {total / P:5.2f} bytes each, {between / P:.2f} between; ledger agrees: {agree}")

# %% tags=["nbval-ignore-output"]
known = {
    name: predicted(strategy=specs.Strategy("hsdp", gpus=4, gpus_per_node=setting["mesh"][1]))
    for name, setting in SHAPES.items()
}
alt = "From 4x1, all replicas, to 1x4, all shards, the peak falls."
sweep("replicas x shards", settings(shaped, known), alt)

# %% [markdown]
# 4x1 is DDP by another name, 1x4 FSDP. "Between" are collectives whose ring crosses from node to
# node. 2x2 has half of DDP's states on a rank, and of what FSDP sends across less than a quarter.
#
# And the norm, over the right ranks and over all:


# %%
def norms():
    found = {}
    for name, setting in SHAPES.items():
        job = Job(**setting)
        job.model.loss(tokens[dist.get_rank() :: 4]).backward()
        over_all = global_norm(*(p.grad for p in job.model.parameters()))
        found[name] = job.fsdp.clip_grad_norm_(1.0), over_all
    return found


for name, (right, over_all) in ranks.run(norms)[0].items():
    print(f"{name}: {right:.4f}; over all ranks {over_all:.4f}, {over_all / right:.3f} times")

# %% [markdown]
# Too large by the square root of the replicas, in the same way in each step, and training goes on:
# it clips too early, and nobody notices.
#
# ## Context: tensor and sequence parallelism
#
# FSDP moves *parameters* to the rank that computes. **Tensor parallelism** leaves them where they
# are, and moves *activations*: each of t ranks has a slice of every weight, all compute on the same
# tokens, and add up. Per block four all_reduces, of [tokens, hidden]: after attention and after the
# MLP, in forward and in backward. **Sequence parallelism** makes of each a reduce_scatter and an
# all_gather, between which norms see 1/t of the tokens: the same bytes, fewer activations.

# %%
print("tokens   tensor parallel   FSDP, a block of Llama 3 8B on 8 ranks, bf16")
for number in (1024, 4096, 16_384, 65_536):
    activations = specs.Collective("all_reduce", number * llama.hidden_size, 2, ranks=8)
    parameters = specs.Collective("all_gather", block, 2, ranks=8)
    both = 4 * activations.bytes_per_rank, 3 * parameters.bytes_per_rank
    print(f"{number:6,}{specs.human(both[0]):>18}{specs.human(both[1]):>12}")

# %% [markdown]
# Few tokens: tensor parallelism moves less. But every block waits for its own: what the next
# operator needs cannot be sent for ahead. So it stays within the node, and FSDP goes across.
#
# Check the bytes on a real SwiGLU, each rank with a quarter of its columns:


# %%
def tensor_parallel():
    torch.manual_seed(0)
    mlp, x = SwiGLU(lab), torch.randn(64, lab.hidden_size)
    mine = slice(dist.get_rank() * 132, (dist.get_rank() + 1) * 132)  # of 528
    gate, up = x @ mlp.gate_proj.weight[mine].T, x @ mlp.up_proj.weight[mine].T  # [64, 132]
    partial = (F.silu(gate) * up) @ mlp.down_proj.weight[:, mine].T  # [64, 192], a part of a sum
    dist.all_reduce(partial)
    return torch.allclose(partial, mlp(x), atol=1e-5)


whole = ranks.run(tensor_parallel)
due = specs.Collective("all_reduce", 64 * lab.hidden_size, 4, ranks=4).bytes_per_rank
print("equal on all ranks:", all(whole), "bytes", whole.log.bytes(), "due", due)

# %% [markdown]
# ## The three questions
#
# | question | FSDP's knobs, by your own runs |
# |---|---|
# | What exactly is sharded that was not before? | Nothing: all states were. Knobs decide what is *whole*, and when. |
# | Why does it save memory? | Smaller units, fewer ahead: less is whole. |
# | Why does it cost more? | Crumbs have latency; what is sent for late is waited for. |
#
# Offload takes the shards away, too, and pays with PCIe and the host's memory. HSDP shards less, to
# send less between nodes. A third gather is P more, for nothing.

# %% [markdown]
# ## Say it out loud
#
# 1. One unit for the whole model: what becomes of FSDP's memory, what of its time?
# 2. Why does wrapping every Linear make a step slower, though the same bytes travel?
# 3. What is exposed communication? How do you find it in a trace?
# 4. Why is one unit ahead nearly as good as three?
# 5. When does a layer have three all_gathers, and how do you get two?
# 6. Somebody offloads to save memory, and steps take five times as long. Where does the time go?
# 7. 16 nodes of 8: what does HSDP send between nodes, what FSDP? What does HSDP hold?
# 8. Why is the gradient norm summed over the shard group alone?

# %% [markdown]
# ## Summary
#
# - Units: (1 + ahead) whole at a time; 3 collectives each. As coarse as fits.
# - Peak falls with finer units, time has a U: no overlap at one end, latency at the other.
# - Exposed communication: on the link, and no compute covers it. One unit ahead hides most.
# - Checkpoint inside of the unit: 2 gathers. Outside: 3 in FSDP1, 2 in fully_shard.
# - Offload: 12 bytes over PCIe for each element of a shard, 28 through the host's memory.
# - HSDP: 3(S-1)/S·P within a node, 2(R-1)/R·P/S between; 16P/S; norm over shards alone.
# - Tensor parallelism moves activations, which cannot be sent for ahead.

# %% [markdown]
# ## Further reading
#
# - Zhao et al. 2023, *PyTorch FSDP* (arXiv 2304.11277): sections 3.2 (hybrid) and 3.3 (prefetching,
#   rate limiter), and 5 for what each bought.
# - Shoeybi et al. 2019, *Megatron-LM* (arXiv 1909.08053); Korthikanti et al. 2022, *Reducing
#   Activation Recomputation* (arXiv 2205.05198): tensor and sequence parallelism.
# - Ren et al. 2021, *ZeRO-Offload* (arXiv 2101.06840): what to leave on the GPU.
# - PyTorch's documentation: `fully_shard`, `CPUOffloadPolicy`, `set_modules_to_forward_prefetch`.
#
# Next: lesson 10 saves and loads what is sharded.
