# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 07 · ZeRO-3: shard the parameters
#
# After this lesson you can
# - gather a unit's parameters before they are used, and free them after, in forward and backward;
# - say what a rank holds at rest, 16P/N, and at the worst moment;
# - keep tied and frozen parameters right;
# - count what it costs: 3P for each micro-batch.
#
# At the end you have measured all of ZeRO's ladder, in one table and one figure, and a rank of 64
# gives the ZeRO paper's numbers.
#
# Time: 45 to 90 minutes.

# %%
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import HTML, display
from torch import nn

from course_lib import comm, explorers, ledger, measure, models, ranks, specs
from course_lib.checks import check
from course_lib.comm.units import units as units_of_a_spec
from course_lib.figures.live_bytes import live_bytes
from course_lib.figures.ladder import Rung, ladder
from course_lib.figures.timeline import timeline
from course_lib.measure.one_of_many import one_of_many
from course_lib.ranks.log import CollectiveLog
from course_lib.sharded.ddp import DDP
from course_lib.sharded.master_weights import MasterWeights
from course_lib.sharded.zero1 import ZeRO1
from course_lib.sharded.zero2 import ZeRO2
from course_lib.sharded.zero3 import ZeRO3

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# ## Play first
#
# Llama 3 8B on 64 GPUs, on ZeRO-2's rung. Almost all that is left are parameters. Guess what
# `zero3` makes of it, and what a step then sends. Then look.
#
# And with eight micro-batches a step? On which rungs does a step send more, and how much?

# %% tags=["explorer", "nbval-ignore-output"]
explorers.ladder(model="llama3-8b", ranks=64, rung="zero2")

# %% [markdown]
# From 17 GiB to 2, and a step sends half as much again: 3P in place of 2P (P: all parameters once
# through the ring). With eight micro-batches it sends 24P, where ZeRO-2 sends 9P. This is the last
# rung, and the first that costs something in every step.
#
# ## What ZeRO-2 left whole
#
# A rank updates 1/N of the parameters, yet it computes with all of them: forward goes through all
# layers. But not through all *at once*. While a layer computes, the others need not be there.
#
# A **unit** is what is gathered and freed together: a block, or a module beside the blocks.

# %%
llama = specs.model("llama3-8b")
units = units_of_a_spec(llama, specs.Strategy("zero3", gpus=64))
sizes = [sum(tensor.numel for tensor in unit.tensors) for unit in units]
print(len(sizes), "units:", Counter(f"{size:,}" for size in sizes))

# %% [markdown]
# An embedding, 32 blocks, a tiny norm, a head. At rest everything is sharded; what is whole comes
# on top. Most implementations gather units **ahead**: while one computes, the next is on its way.
#
# ### Exercise 07-transient: The worst moment (3 points)


# %% exercise="07-transient"
def held(units, ranks, ahead):
    """Bytes on a rank of ZeRO-3, with AdamW in mixed precision (2 + 2 + 12 bytes).

    units: list of ints, the parameters of each unit in the order of use; ranks divides each.
    ahead: while a unit computes, this many of the next ones are whole, too.
    Returns {"rest": bytes of model states at rest, "whole": bytes of whole parameters when most
    are}. For units of 40, 120 and 80 on 4 ranks, one ahead: 960, and 2 * (120 + 80) = 400.
    """
    ### BEGIN SOLUTION
    rest = 16 * sum(units) // ranks
    together = [sum(units[i : i + 1 + ahead]) for i in range(len(units))]
    return {"rest": rest, "whole": 2 * max(together)}
    ### END SOLUTION


# %% check="07-transient"
check("07-transient", held)

# %% [markdown]
# For Llama 3 8B: 2 GiB at rest on each of 64 ranks, and then?

# %%
print(f"at rest {specs.human(16 * sum(sizes) // 64)}; whole at a time, with units ahead:")
for ahead in (0, 1, 4, len(sizes)):
    most = max(2 * sum(sizes[i : i + 1 + ahead]) for i in range(len(sizes)))
    print(f"{ahead:3} ahead: {specs.human(most)}")

# %% [markdown]
# The largest units are the embedding and the head. With more ranks what is at rest goes to nothing,
# and what is whole does not change: **largest unit**, that is the floor of ZeRO-3.
#
# ## How to free a parameter
#
# Forward is over, the unit could go. But backward will need its weights once more, so autograd has
# *saved* them. Predict: how much is alive after each of these two?


# %%
def point_elsewhere(weight):
    weight.data = torch.empty(0)


def empty_the_storage(weight):
    weight.untyped_storage().resize_(0)  # bytes


for free in (point_elsewhere, empty_the_storage):
    layer = nn.Linear(1000, 1000, bias=False)
    with measure.LiveBytes(layer) as live:
        out = layer(torch.ones(1, 1000, requires_grad=True))
        free(layer.weight)
        print(f"{free.__name__:18} {sum(live.now.values()):>9,} bytes alive")

# %% [markdown]
# A tensor is a shape and a **storage**, the block of memory behind it. Autograd saved a view of the
# weight, with the same storage. Another tensor in `weight.data` leaves that alone: 4 MB stay. Take
# the storage's bytes away, and every view of it is empty.
#
# And the other way: give the storage its bytes back, write the numbers, and autograd's view has
# them, too. How you write matters:

# %%
weight = layer.weight  # its storage is empty
weight.untyped_storage().resize_(weight.nbytes)
with torch.no_grad():
    weight.copy_(torch.ones(1000, 1000))
try:
    out.sum().backward()
except RuntimeError as error:
    print(str(error)[:89])

# %% [markdown]
# Autograd counts writes to what it has saved: a changed weight would give a wrong gradient. It
# cannot know that these are the same numbers again. What is written through `weight.data` it does
# not see.

# %%
x = torch.ones(1, 1000, requires_grad=True)
out = layer(x)
empty_the_storage(weight)
weight.untyped_storage().resize_(weight.nbytes)
weight.data.copy_(torch.ones(1000, 1000))
out.sum().backward()
x.grad[0, :3]

# %% [markdown]
# That is the whole trick: **a parameter keeps its storage, and the storage is resized.** (An empty
# one is not to be read: no error, but a crash.)
#
# ## In forward
#
# Each tensor is cut flat by itself: N pieces of ⌈numel / N⌉ elements, padded.


# %%
def padded(tensor):
    """Flat, with zeros up to a multiple of the ranks: [N·s]."""
    return F.pad(tensor.detach().flatten(), (0, -tensor.numel() % dist.get_world_size()))


def piece_of(tensor):
    """This rank's piece: [s], a copy."""
    return padded(tensor).chunk(dist.get_world_size())[dist.get_rank()].clone()


def pieces():
    return piece_of(torch.arange(1.0, 6.0)).tolist()


ranks.run(pieces, world_size=4)

# %% [markdown]
# Now the hooks. `unit.register_forward_pre_hook(f)` calls `f(unit, inputs)` before each forward of
# `unit`, `register_forward_hook(f)` calls `f(unit, inputs, output)` after it; return nothing from
# them.
#
# The check looks at which units are whole while a layer computes, and at what autograd keeps. It
# changes your shards, as an optimizer would, and runs forward again.
#
# ### Exercise 07-gather: Gather before forward, free after it (5 points)


# %% exercise="07-gather"
def shard_forward(unit):
    """Keep 1/N of a unit's parameters, and have them whole in its forward alone.

    Runs on every rank, once for each unit (an nn.Module, the same on all ranks).
    Returns {parameter: shard [s]}, and registers hooks on the unit. At once and after each
    forward, every parameter's storage has 0 bytes. Before each forward, one all_gather for each
    parameter brings the shards [s] of all ranks together, [N·s], and the parameter has the first
    numel of these elements; no other copy stays. A weight of shape [3, 3] on 2 ranks: s is 5, 10
    are gathered, 9 are written.
    """
    ### BEGIN SOLUTION
    shards = {p: piece_of(p) for p in unit.parameters()}

    def free(*_):
        for p in shards:
            p.untyped_storage().resize_(0)

    def gather(*_):
        for p, shard in shards.items():
            whole = shard.new_empty(dist.get_world_size() * len(shard))  # [N·s]
            dist.all_gather_single(whole, shard)
            p.untyped_storage().resize_(p.nbytes)
            p.data.copy_(whole[: p.numel()].view_as(p))

    free()
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
    return shards
    ### END SOLUTION


# %% check="07-gather"
check("07-gather", shard_forward)

# %% [markdown]
# At rest there are only shards, and the optimizer updates shards: so ZeRO-2's all_gather after the
# update is gone. The next forward gathers what is new.

# %% [markdown]
# ## In backward
#
# Backward comes to a unit with the gradient of its output. From there it needs the weights, as
# the gradient of a layer's *input* is made of them. So: gather again. When the unit's last gradient
# is there, free again.
#
# The gradients? As in lesson 06: each goes to its owners as it becomes ready, and is freed.
#
# Say forward is done, `gather()` makes the unit whole, `free()` empties it. Hooks:
# `unit.register_full_backward_pre_hook(f)` calls `f(unit, gradients)` before the unit's backward,
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)` when `p.grad` is there.
#
# ### Exercise 07-backward: Gather again for backward (5 points)


# %% exercise="07-backward"
def shard_backward(unit, gather, free):
    """Make backward gather, reduce and free a unit. Runs on every rank, once for each unit.

    gather(): the unit's parameters are whole. free(): they are empty, as they are after forward.
    Registers hooks, and returns {parameter: [s]}, a dict that backward fills: of each trained
    parameter this rank's shard of the mean over ranks (reduce_scatter), summed over micro-batches.
    When a unit is through, each p.grad is None, and no copy of a whole gradient stays. Frozen
    parameters (requires_grad False) get no gradient. On 2 ranks, gradients [2., 4., 6.] and
    [4., 0., 2.] are [3., 2.] on rank 0, and [4., 0.] on rank 1.
    """
    ### BEGIN SOLUTION
    trained = [p for p in unit.parameters() if p.requires_grad]
    sums, arrived = {}, []

    def on_gradient(p):
        whole = padded(p.grad) / dist.get_world_size()  # [N·s]
        shard = whole.new_empty(len(whole) // dist.get_world_size())  # [s]
        dist.reduce_scatter_single(shard, whole)
        sums[p] = sums.get(p, 0) + shard
        p.grad = None
        arrived.append(p)
        if len(arrived) == len(trained):
            free()
            arrived.clear()

    unit.register_full_backward_pre_hook(lambda *_: gather())
    for p in trained:
        p.register_post_accumulate_grad_hook(on_gradient)
    return sums
    ### END SOLUTION


# %% check="07-backward"
check("07-backward", shard_backward)

# %% [markdown]
# That is ZeRO-3. `course_lib.sharded.zero3` adds what makes it usable: one all_gather and one
# reduce_scatter for each unit, not for each tensor; the next unit gathered ahead, so that it
# travels while this one computes; units that are called twice, or are frozen as a whole, where no
# gradient says that backward is through. Read it: `zero3`, then `unit` and `gathering`.

# %% [markdown]
# ## Tied weights
#
# A head that shares its weight with the embedding: one parameter, two modules, at both ends of the
# model. Were each a unit of its own, the weight would have two shards, updated apart, and one unit
# would free what the other needs. So they are **one unit**: whole from its first use to its last.
#
# ### Exercise 07-tied: One unit for tied weights (3 points)


# %% exercise="07-tied"
def units_of(modules):
    """Cut a model into units.

    modules: a list of nn.Modules, each of which would be a unit, in the order of use.
    Returns a list of units, each a list of parameters: every parameter is in one unit, once, and
    modules that share a parameter are in the same one. Where an embedding has [w], a block [a, b]
    and a head [w, bias]: [[a, b], [w, bias]], in any order.
    """
    ### BEGIN SOLUTION
    units = []
    for module in modules:
        unit = dict.fromkeys(module.parameters())  # a set that keeps its order
        for other in [each for each in units if each.keys() & unit.keys()]:
            units.remove(other)
            unit = other | unit
        units.append(unit)
    return [list(unit) for unit in units]
    ### END SOLUTION


# %% check="07-tied"
check("07-tied", units_of)

# %% [markdown]
# The price: that unit is whole nearly all the time. A tied embedding of 128,000 x 4096 is 1 GB in
# bf16, beside each block. What does that do to the worst moment?
#
# ## What it sends
#
# Count in P, where P elements once through a ring are (N-1)/N · P (lesson 03). Each micro-batch:
#
# - an all_gather of each unit for forward,
# - one again for backward,
# - a reduce_scatter of its gradients.
#
# And frozen parameters, as in fine-tuning? Say that trained ones lie below them, so that backward
# passes through.
#
# ### Exercise 07-volume: What a step sends (3 points)


# %% exercise="07-volume"
def volume(trained, frozen, ranks, micro_batches, itemsize):
    """Bytes that a rank sends in one step.

    trained, frozen: ints, elements; ranks divides both. Backward passes through the frozen ones.
    micro_batches: int. itemsize: bytes of one element, for gradients and parameters alike.
    Returns {"zero2": …, "zero3": …}, ints. For 80 trained, none frozen, on 4 ranks, with 1
    micro-batch and 2 bytes, once through the ring is 3 * 20 * 2 = 120 bytes: 240 and 360.
    """
    ### BEGIN SOLUTION
    t, f = ((ranks - 1) * size // ranks * itemsize for size in (trained, frozen))
    return {"zero2": (micro_batches + 1) * t, "zero3": micro_batches * (3 * t + 2 * f)}
    ### END SOLUTION


# %% check="07-volume"
check("07-volume", volume)

# %% [markdown]
# 3GP against (G+1)P: with one micro-batch 1.5 times as much, with many nearly three times. Under
# DDP and ZeRO-1 accumulation saves messages, under ZeRO-3 it saves none. And where only an adapter
# is trained, ZeRO-2 sends next to nothing, and ZeRO-3 still 2P of frozen weights.

# %% [markdown]
# ## Run: equal to DDP
#
# The small Llama of lesson 06, with its loss inside.

# %%
lab = replace(specs.model("lab-25m"), name="lab-5m", vocab_size=1000)
lab = replace(lab, hidden_size=234, head_dim=26, intermediate_size=630)
tokens = torch.randint(lab.vocab_size, (16, 17), generator=torch.Generator().manual_seed(0))
MIB, P = 2**20, lab.parameters


class Lab(nn.Module):
    """A Llama whose forward gives its loss; its first blocks may be frozen."""

    def __init__(self, dtype=torch.float32, frozen=0):
        super().__init__()
        self.llama = models.build(lab, dtype=dtype)
        for block in self.llama.model.layers[:frozen]:
            block.requires_grad_(False)

    def forward(self, tokens):
        return self.llama.loss(tokens)


# %% [markdown]
# One way to train it, on every rung of the ladder:


# %%
class Job:
    """A model on one rung; `step()` trains on this rank's sequences, [16 / ranks, 17]."""

    def __init__(self, stage, dtype=torch.float32, frozen=0):
        self.model = self.module = Lab(dtype, frozen)
        options = {"lr": 1e-3, "foreach": False}
        if stage is DDP:
            self.module, self.backward = DDP(self.model, 4 * MIB), torch.Tensor.backward
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        else:
            buckets = {} if stage is ZeRO3 else {"bucket_bytes": 4 * MIB}
            self.optimizer = stage(self.model, torch.optim.AdamW, **buckets, **options)
            self.backward = self.optimizer.backward

    def step(self, micro_batches=1):
        self.optimizer.zero_grad()
        for part in tokens[dist.get_rank() :: dist.get_world_size()].chunk(micro_batches):
            loss = self.module(part)
            self.backward(loss / micro_batches)
        self.optimizer.step()
        return loss.item()


# %% [markdown]
# Between steps a ZeRO-3 model is empty. Inside `zero.gathered()` it is whole, to look at or to
# save.


# %%
def train(stage, micro_batches=1, dtype=torch.float32, frozen=0):
    """Three steps: parameters, bytes at rest, and where the last step lies in the log."""
    job = Job(stage, dtype, frozen)
    for _ in range(3):
        start = len(ranks.entries())
        job.step(micro_batches)
    found = {"log": (start, len(ranks.entries()))}
    found["held"] = measure.model_state_bytes(job.model, job.optimizer)
    with job.optimizer.gathered() if stage is ZeRO3 else nullcontext():
        flat = nn.utils.parameters_to_vector(job.model.parameters()).detach()
    return found | {"parameters": flat if dist.get_rank() == 0 else None}


# %%
jobs = {("DDP", 1): DDP, ("ZeRO-2", 1): ZeRO2, ("ZeRO-2", 4): ZeRO2}
jobs |= {("ZeRO-3", 1): ZeRO3, ("ZeRO-3", 4): ZeRO3}
runs = {key: ranks.run(train, args=(stage, key[1])) for key, stage in jobs.items()}
base = runs["DDP", 1][0]["parameters"]
for (name, micro_batches), run in runs.items():
    off = (run[0]["parameters"] - base).abs()
    print(f"{name:6}, {micro_batches} micro-batches: {(off < 1e-5).double().mean():.3%} as DDP's")

# %% [markdown]
# The same but for rounding.
#
# ## The receipts
#
# **At rest**, after a step and before zero_grad, everything is cut in N: (4 + 4 + 8)P/4 in fp32,
# and (2 + 2 + 12)P/4 in mixed precision. Both are 4P; which line is larger in which?

# %%
measured = {"fp32": runs["ZeRO-3", 1]}
measured["zero-bf16"] = ranks.run(train, args=(ZeRO3, 1, torch.bfloat16))
print(f"16P/4 = {4 * P:,}")
for precision, run in measured.items():
    states = ledger.model_states(lab, specs.Recipe(precision), specs.Strategy("zero3", gpus=4))
    print(f"{precision}: {states.total:,}")
    title = f"ZeRO-3 at rest, {precision}, each rank"
    display(measure.receipt(title, states.by_category(), run[0]["held"]))

# %% [markdown]
# Difference 0. What is above 4P is padding, up to 3 elements of each tensor, and AdamW's counts of
# steps, 4 bytes each.
#
# **On the wire.** The ledger knows model, recipe and units, and nothing of the run.


# %%
def last_step(run):
    """The last step's log, without the all_reduce of one number: the gradients' norm."""
    return CollectiveLog(
        [entry for entry in entries[slice(*result["log"])] if entry.elements > 1]
        for entries, result in zip(run.log, run)
    )


predicted, sent = {}, {}
for name, micro_batches in [key for key in runs if key[0] != "DDP"]:
    strategy = specs.Strategy(name.lower().replace("-", ""), gpus=4)
    recipe = specs.Recipe("fp32", grad_accum=micro_batches)
    plan = comm.step(lab, recipe, strategy, bucket_bytes=4 * MIB)
    line, log = f"{name}, {micro_batches} micro-batches", last_step(runs[name, micro_batches])
    predicted[line], sent[line] = plan.bytes_per_rank, sum(log.bytes().values())
    print(f"{line}: {sent[line] / (3 * P):.2f} P; counts agree: {plan.counts() == log.counts()}")
measure.receipt("one step, sent by each rank", predicted, sent)

# %% [markdown]
# 2P and 5P, 3P and 12P. (3P bytes are one P through the ring of four: 3/4 · 4P.)
#
# Now the log of one step itself. Before you look: in which order do gathers and reductions come?

# %% tags=["nbval-ignore-output"]
timeline(last_step(runs["ZeRO-3", 1]))

# %% [markdown]
# First eleven all_gathers: embedding, blocks, norm, head. Then, in backward, all_gathers in the
# reverse order, and between them the reduce_scatters of units that are done. After the last of
# these nothing comes any more: the update is each rank's own.
#
# ## The worst moment, measured
#
# Follow rank 0 through a step, byte by byte, under ZeRO-2 and ZeRO-3. Sketch both before you run
# it: what stays, what comes and goes?


# %%
def followed(stage):
    """The bytes that are live at each moment of a second step, and where its update begins."""
    job = Job(stage)
    job.step()
    job.optimizer.zero_grad()
    with measure.LiveBytes(job.model, job.optimizer) as live:
        job.backward(job.module(tokens[dist.get_rank() :: dist.get_world_size()]))
        backward = len(live.timeline)
        job.optimizer.step()
    return {"moments": [moment.live for moment in live.timeline], "backward": backward}


# %% tags=["nbval-ignore-output"]
STAGES = {"ZeRO-2": ZeRO2, "ZeRO-3": ZeRO3}
steps = {name: ranks.run(followed, args=(stage,))[0] for name, stage in STAGES.items()}
for name, step in steps.items():
    totals = [sum(live.values()) for live in step["moments"]]
    print(f"{name}: at rest {totals[-1] / MIB:5.1f} MiB, peak {max(totals) / MIB:5.1f} MiB")


# %% tags=["nbval-ignore-output"]
alt = "Live bytes in a step. ZeRO-2: all parameters, 20 MiB, stay throughout. ZeRO-3: a quarter of "
alt += "them stays, and on top a few units, gathered and freed one after another, twice."
curves = {name: (step["moments"], step["backward"]) for name, step in steps.items()}
HTML(live_bytes(curves, alt))

# %% [markdown]
# Under ZeRO-2 the parameters are a floor that never moves. Under ZeRO-3 a quarter is left, and a
# thin band on top: as one unit is freed another comes, through forward and again through backward.
#
# How high is that band, in blocks? Count what is whole, and buffers in which something comes.

# %% tags=["nbval-ignore-output"]
block = 4 * sum(p.numel() for p in Lab().llama.model.layers[0].parameters())
shards = measured["fp32"][0]["held"]["parameters"]
whole = [
    live.get("parameters", 0) + live.get("gather_buffers", 0) - shards
    for live in steps["ZeRO-3"]["moments"]
]
print(f"a block has {block:,} bytes; at most {max(whole) / block:.2f} blocks, of eight")

# %% [markdown]
# One block is whole, the next one is in its buffer; and for a moment a block is there twice, in the
# buffer that it came in and in its place. However deep the model, the band stays that high. With
# `prefetch=0` it is lower by one, and compute waits for every unit.

# %% [markdown]
# ## Frozen layers
#
# Freeze six of eight blocks; embedding, two blocks, norm and head are trained. What gets less, what
# does not? Work it out from shapes: parameters are sharded and gathered, trained or not; gradients,
# states and reductions are of trained ones alone.


# %%
def by_shapes(frozen):
    """Of each rank, in fp32 on 4 ranks: what it holds, and what it sends in a step."""
    shard = {p: -(-p.numel() // 4) for p in Lab(frozen=frozen).parameters()}
    trained = [size for p, size in shard.items() if p.requires_grad]
    every, some = sum(shard.values()), sum(trained)
    held = {"parameters": 4 * every, "gradients": 4 * some}
    held["optimizer_states"] = 8 * some + 4 * len(trained)  # moments, and counts of steps
    return held | {"all_gather": 2 * 3 * 4 * every, "reduce_scatter": 3 * 4 * some}


frozen_run = ranks.run(train, args=(ZeRO3, 1, torch.float32, 6))
got = frozen_run[0]["held"] | dict(last_step(frozen_run).bytes())
measure.receipt("six of eight blocks frozen, each rank", by_shapes(6), got)

# %% [markdown]
# Gradients and states shrink, and so do the reductions. All_gathers do not: frozen weights travel
# as before. (Were the embedding frozen, too, backward would end above the frozen blocks, and these
# would be gathered once.)
#
# ## The ladder
#
# All rungs, side by side: same model, same data, same ranks, in one run; the steps are timed in
# turns. Predict the order in each column: held, peak, moved, time.


# %%
RUNGS = {"ddp": DDP, "zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}


def climbed():
    """Of each rung: losses, where its third step lies in the log, bytes held, peak, seconds."""
    jobs = {name: Job(stage) for name, stage in RUNGS.items()}
    found = {name: {"losses": [job.step(), job.step()]} for name, job in jobs.items()}
    for name, job in jobs.items():
        start = len(ranks.entries())
        with measure.LiveBytes(job.model, job.optimizer) as live:
            found[name]["losses"].append(job.step())
        found[name] |= {"log": (start, len(ranks.entries())), "peak": live.peak.total}
        found[name]["held"] = measure.model_state_bytes(job.model, job.optimizer)
    for name in 5 * list(jobs):
        dist.barrier()
        start = time.perf_counter()
        jobs[name].step()
        dist.barrier()
        found[name].setdefault("seconds", []).append(time.perf_counter() - start)
    return found


climb = ranks.run(climbed, timeout=300)
for name, seen in climb[0].items():
    print(f"{name}: losses {', '.join(f'{loss:.4f}' for loss in seen['losses'])}")

# %% tags=["nbval-ignore-output"]
rungs = []
for name, seen in climb[0].items():
    entries = climb.log[0][slice(*seen["log"])]
    moved = sum(entry.bytes_per_rank for entry in entries if entry.elements > 1)
    rungs.append(
        Rung(name, **seen["held"], peak=seen["peak"], moved=moved, seconds=median(seen["seconds"]))
    )
ladder(rungs)

# %% [markdown]
# At rest every rung holds less than the one before, and at the peak, too. But the peak falls by
# less: activations are the same on every rung, and buffers come on top. ZeRO-2's buckets of 4 MiB
# are large beside a model of 20 (lesson 06). Three move the same, the last half as much again. The
# times are those of processes on one machine, whose network is its memory: they show what more
# and smaller collectives and more copies cost. On a cluster the link decides (the explorer above).

# %% [markdown]
# ## The peak, predicted
#
# `measure.work` follows one micro-batch of the plain model in one process: activations, and when
# each gradient is there. `predicted_peak` adds what a rung holds at each of these moments. Peaks
# differ by a little from run to run, as a thread lets go of a buffer late.

# %% tags=["nbval-ignore-output"]
model = Lab()
events = measure.work(model.llama, lambda: model(tokens[::4]))
for name, seen in climb[0].items():
    recipe, strategy = specs.Recipe("fp32"), specs.Strategy(name, gpus=4)
    peak = measure.predicted_peak(events, lab, recipe, strategy, bucket_bytes=4 * MIB)
    print(f"{name}: predicted {peak.bytes / MIB:5.1f} MiB, at {peak.at};", end=" ")
    print(f"measured {seen['peak'] / MIB:5.1f} MiB, {seen['peak'] / peak.bytes:.3f} of it")

# %% [markdown]
# ## The paper's numbers, from one rank of 64
#
# Table 1 of the ZeRO paper, 7.5 billion parameters on 64 ranks: 120 GB on each without sharding,
# then 31.4, 16.6 and 1.88.

# %% [markdown]
# Sixty-four ranks do not fit here; one of them does. `one_of_many(64)` makes this process rank 0 of
# 64, the others of which are not there: it cuts, gathers and frees as it would among them, and only
# its numbers mean nothing. Our model is smaller, so scale bytes by 7.5e9 / P.


# %%
def rank_0_of_64(stage):
    """Bytes of model states after a step in ZeRO's mixed precision."""
    with one_of_many(64):
        model = module = Lab(torch.bfloat16)
        if stage is DDP:
            module, backward = DDP(model), torch.Tensor.backward
            optimizer = MasterWeights(model.parameters(), torch.optim.AdamW)
        else:
            optimizer = stage(model, torch.optim.AdamW)
            backward = optimizer.backward
        backward(module(tokens[:1]))
        optimizer.step()
        return sum(measure.model_state_bytes(model, optimizer).values())


# %%
(row,) = [row for row in ledger.zero_table1() if (row.parameters, row.ranks) == (7.5e9, 64)]
printed = dict(zip(RUNGS, ("120", *row.cells)))
formula = {"ddp": 16, "zero1": 4 + 12 / 64, "zero2": 2 + 14 / 64, "zero3": 16 / 64}  # bytes per P
print("        paper, GB   measured   beyond the formula, bytes")
for name, stage in RUNGS.items():
    nbytes, digits = rank_0_of_64(stage), len(printed[name].partition(".")[2])
    scaled = f"{nbytes * 7.5e9 / P / 1e9:.{digits}f}"
    print(
        f"{name:8}{printed[name]:>9}{scaled:>11}{nbytes - formula[name] * P:>13,.0f} of {nbytes:,}"
    )

# %% [markdown]
# Equal, in every digit that is printed. What is beyond the formula is AdamW's counts of steps, 4
# bytes for each tensor that it sees (one, where it sees a flat shard), and padding: at the end of
# the flat space for ZeRO-1 and 2, up to 63 elements of each tensor for ZeRO-3. With 7.5 billion
# parameters that is nothing.
#
# What the table leaves out, and your timelines did not: activations, buffers, the largest unit.

# %% [markdown]
# ## The three questions
#
# | question | ZeRO-3, by your own run |
# |---|---|
# | What exactly is sharded that was not before? | The parameters. At rest all lines of the receipt are a quarter, and between steps the model is empty. |
# | Why does it save memory? | A rank computes in one unit at a time, the others need not be whole: 16P/N, and teeth of two units. The floor under ZeRO-2's curve is gone. |
# | Why does it cost more? | What was freed must come again. Two all_gathers and a reduce_scatter are 3P, in each micro-batch: 12P with four, where ZeRO-2 sends 5P. |

# %% [markdown]
# ## Say it out loud
#
# 1. Walk through one block's life in a step: when is it gathered, when is it freed?
# 2. Derive 3P. Where did ZeRO-2's all_gather after the update go?
# 3. More and more GPUs: what does a rank of ZeRO-3 still hold?
# 4. Why must a parameter's storage come back, and not a new tensor with the same numbers?
# 5. You accumulate over 16 micro-batches on a slow network. What does ZeRO-3 send, what ZeRO-2?
# 6. You fine-tune an adapter of 1% under ZeRO-3. What gets small, what does not?
# 7. Somebody's ZeRO-3 has the right losses and ZeRO-2's memory. Name three causes.

# %% [markdown]
# ## Summary
#
# - ZeRO-3 = ZeRO-2, and each unit's parameters are gathered before use and freed after.
# - At rest 16P/N; on top the unit that computes and those on their way. The largest is a floor.
# - A parameter keeps its storage, which is resized: so autograd sees it whole again.
# - Forward gathers, backward gathers again, gradients are scattered: 3P.
# - Nothing stays between micro-batches: 3GP, where ZeRO-2 sends (G+1)P.
# - Tied weights: one unit. Frozen ones: no gradients, no states, and gathered all the same.
# - The update sends nothing: the next forward gathers what is new.

# %% [markdown]
# ## Further reading
#
# - Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), sections 5.3 and 7.2: stage 3, its volume.
# - Zhao et al. 2023, *PyTorch FSDP* (arXiv 2304.11277): units, and what it takes to gather ahead.
# - DeepSpeed's documentation, *ZeRO configuration*: `stage3_prefetch_bucket_size`,
#   `stage3_max_live_parameters`, `stage3_param_persistence_threshold`.
#
# Next: lesson 08 takes the life cycle of a unit apart, as PyTorch's FSDP has it.
