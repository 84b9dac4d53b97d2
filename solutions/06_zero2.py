# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 06 · ZeRO-2: shard the gradients
#
# After this lesson you can
# - reduce gradients to their owners, a bucket at a time, while backward runs;
# - free a gradient so that its memory is really gone, and find what keeps it;
# - accumulate over micro-batches in shards, and say what that costs;
# - tell when ZeRO-2 sends no more than ZeRO-1, and when it even needs more memory.
#
# At the end ZeRO-2 and DDP have the same parameters, and bytes at rest and on the wire are the
# ledger's: difference 0.
#
# Time: 45 to 90 minutes.

# %%
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from IPython.display import HTML
from torch import nn

from course_lib import comm, explorers, ledger, measure, models, ranks, specs
from course_lib.checks import check
from course_lib.figures.live_bytes import live_bytes
from course_lib.figures.timeline import timeline
from course_lib.ranks.log import CollectiveLog
from course_lib.sharded.ddp import DDP
from course_lib.sharded.flat import Flat
from course_lib.sharded.zero1 import ZeRO1
from course_lib.sharded.zero2 import ZeRO2

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# ## Play first
#
# Each row is a rung of ZeRO's ladder: what a rank holds, and what it sends in a step. Go from
# `zero1` to `zero2`. Which part becomes shorter, and does the step cost more?
#
# Then guess, before you move it: which rungs grow more expensive when a step has more
# micro-batches (accumulation)? Why those?

# %% tags=["explorer", "nbval-ignore-output"]
explorers.ladder(model="llama2-7b", ranks=64, rung="zero2")

# %% [markdown]
# Call what it costs to send all parameters, or gradients, through the ring once **one pass (P)**:
# 2P is 24.7 GiB here. With one micro-batch the second rung is free: 2P, as DDP. With eight it sends
# 9P, where ZeRO-1 still sends 2P. This lesson builds that rung, and shows where both numbers come
# from.
#
# ## What ZeRO-1 left whole
#
# A small Llama and one batch for the whole lesson; each rank takes every N-th sequence.

# %%
lab = replace(specs.model("lab-25m"), name="lab-5m", vocab_size=1000)
lab = replace(lab, hidden_size=234, head_dim=26, intermediate_size=630)
tokens = torch.randint(lab.vocab_size, (16, 17), generator=torch.Generator().manual_seed(0))
MIB = 2**20


def my_part():
    """This rank's sequences of the batch: [16 / ranks, 17]."""
    return tokens[dist.get_rank() :: dist.get_world_size()]


print(f"P = {lab.parameters:,} parameters; 4P = {4 * lab.parameters:,} bytes in fp32")


# %% [markdown]
# One step of lesson 05's ZeRO-1 on four ranks. What does a rank hold afterwards, before the
# gradients are set to zero?


# %%
def one_step(stage):
    model = models.build(lab)
    zero = stage(model, torch.optim.AdamW, bucket_bytes=4 * MIB)
    zero.backward(model.loss(my_part()))
    zero.step()
    return measure.model_state_bytes(model, zero)


for what, nbytes in ranks.run(one_step, world_size=4, args=(ZeRO1,))[0].items():
    print(f"{what:17} {nbytes:12,} bytes = {nbytes / lab.parameters:.2f} P")

# %% [markdown]
# Optimizer states: 8P/4. Gradients: 4P, on every rank. Yet a rank updates its shard alone, and for
# that it needs the mean over ranks of *its shard's* gradients. Three quarters of what it holds
# serve nobody once they are reduced.
#
# ## Who owns what
#
# As in lesson 05, all parameters lie end to end in a **flat space**. Unlike lesson 05's single cut,
# which gave each rank one stretch in the module's order, this flat space is in reversed order and
# cut into buckets, each bucket into N pieces, and rank r owns the r-th piece of every bucket. Its
# **shard** is these pieces, side by side. A toy with 11 parameters, two ranks, buckets of 4
# elements:

# %%
toy = nn.Sequential(nn.Linear(2, 3), nn.Linear(1, 1))
names = {parameter: name for name, parameter in toy.named_parameters()}
flat = Flat([list(toy.parameters())], rank=0, world_size=2, bucket_bytes=16)  # 4 fp32 elements


def show(cut):
    return f"[{cut.start}:{cut.stop}]"


print(f"a shard has {flat.shard_size} elements")
for number, bucket in enumerate(flat.buckets):
    print(f"bucket {number}: size {bucket.size}, in_shard {show(bucket.in_shard)}")
    for part in bucket.parts:
        print(f"    {names[part.parameter]:8} {show(part.within)} → {show(part.place)}")

# %% [markdown]
# Left of the arrow are a parameter's elements, right of it their places in the bucket. Last
# parameters first, since backward computes their gradients first. A parameter may lie in two
# buckets. The last bucket has 4 elements, but its parts fill 3: one is padding, so that it splits
# evenly.
#
# A bucket becomes the owners' with one `dist.reduce_scatter_single(piece, whole)`: it adds up
# `whole` [bucket.size] over the ranks, and leaves in `piece` [bucket.size / N] this rank's piece
# of the sum.
#
# ### Exercise 06-reduce: Reduce each bucket to its owners (3 points)


# %% exercise="06-reduce"
def reduce_to_owners(flat):
    """The mean over ranks of this rank's shard of the gradients. Runs on every rank.

    flat: the flat space; backward has been run. Each of flat.buckets has `size`, `in_shard` (the
    slice of the shard where this rank's piece belongs) and `parts`. Of each part,
    part.of(part.parameter.grad) are the gradients [elements] that belong to [part.place].
    Returns [flat.shard_size]: where two ranks have 2, 4, 6 and 4, 0, 2 as the gradients of three
    parameters in one bucket (of 4), rank 0 returns [3., 2.] and rank 1 [4., 0.].
    """
    ### BEGIN SOLUTION
    shard = torch.zeros(flat.shard_size)
    for bucket in flat.buckets:
        whole = torch.zeros(bucket.size)
        for part in bucket.parts:
            whole[part.place] = part.of(part.parameter.grad) / dist.get_world_size()
        dist.reduce_scatter_single(shard[bucket.in_shard], whole)
    return shard
    ### END SOLUTION


# %% check="06-reduce"
check("06-reduce", reduce_to_owners)

# %% [markdown]
# That is the first half of an all-reduce (lesson 03), so half of its bytes. ZeRO-1 does the same,
# once a step. The second half, the all_gather, comes after the update, and carries parameters.
#
# No memory is saved yet: the whole gradients are still there. When could they go?
#
# ## As they become ready
#
# Backward completes one gradient after another. A gradient that has been copied into its buckets
# can go at once, and a bucket that is full can be reduced at once. Then at no time are all
# gradients there.
#
# To free is to let go of the last reference. Predict what these hooks leave in memory:

# %%
layer, kept = nn.Linear(1000, 1000, bias=False), []


def keep_a_little(weight):
    kept.append(weight.grad.flatten()[:10])  # ten numbers, to look at later
    weight.grad = None


layer.weight.register_post_accumulate_grad_hook(keep_a_little)
with measure.LiveBytes(layer) as live:
    layer(torch.ones(1, 1000)).sum().backward()
print(f"grad is {layer.weight.grad}; kept: {kept[0].nbytes} bytes")
print(f"alive beside parameters: {sum(live.now.values()) - live.now['parameters']:,} bytes")

# %% [markdown]
# Ten numbers keep 4 MB alive: a slice is a *view*, and a view keeps the whole tensor. Lists, dicts
# and closures of hooks do the same, without an error, and with the right numbers. It is the
# classic bug of hand-written ZeRO-2; a tracker of bytes finds it, an equality test does not.
#
# Now write the hooks. The check looks at what is alive during backward and after it, and at what
# has been sent by when. It runs two backwards.
#
# ### Exercise 06-free: Reduce and free as backward goes on (5 points)


# %% exercise="06-free"
def reduce_and_free(flat, shard):
    """Make backward reduce gradients and free them. Runs on every rank, before training.

    flat: as before. shard: [flat.shard_size], zeros when backward begins; after it, the mean over
    ranks of this rank's shard of the gradients, and every grad is None.
    Register a hook for each of flat.parameters. It puts the gradient's parts into their buckets
    (zeros at first), then frees it; the hook that brings a bucket's last part reduces the bucket
    and forgets it. With w1 in bucket 1 and w2 in both, bucket 0 leaves before w1.grad is there.
    Compare parameters by `is`: == compares their elements.
    """
    ### BEGIN SOLUTION
    places = [(bucket, part) for bucket in flat.buckets for part in bucket.parts]
    wholes, arrived = {}, Counter()

    def on_gradient(parameter):
        for bucket, part in places:
            if part.parameter is parameter:
                whole = wholes.setdefault(bucket, torch.zeros(bucket.size))
                whole[part.place] = part.of(parameter.grad) / dist.get_world_size()
                arrived[bucket] += 1
                if arrived[bucket] == len(bucket.parts):
                    dist.reduce_scatter_single(shard[bucket.in_shard], wholes.pop(bucket))
                    del arrived[bucket]
        parameter.grad = None

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)
    ### END SOLUTION


# %% check="06-free"
check("06-free", reduce_and_free)

# %% [markdown]
# That is the heart of ZeRO-2. `course_lib.sharded.zero2` adds three things: it starts a
# reduce_scatter with `async_op=True` and goes on, so that it travels while backward computes; it
# has at most two under way, since each holds a bucket; and buckets leave in the same order on all
# ranks, with zeros for parameters that got no gradient. That order is learnt: in the first backward
# it is the flat space's, and at its end rank 0 broadcasts, once, in which order its buckets were
# complete. Read it: course_lib/sharded/zero2.py.

# %% [markdown]
# ## See it: a step in bytes
#
# `measure.LiveBytes` notes every tensor's bytes as it comes and goes. Follow rank 0 through one
# step, of two micro-batches, under both stages. The *peak* of a stretch is the most that is live at
# any of its moments: this is what must fit (more in lesson 02). `foreach=False` has AdamW update
# one tensor at a time, so that its temporaries are small. Before you look: where do the stages
# differ, where are they the same?


# %%
def followed(stage):
    """The bytes that are live at each moment of a step, on this rank, and where backward ends."""
    model = models.build(lab)
    zero = stage(model, torch.optim.AdamW, bucket_bytes=MIB, foreach=False)
    zero.backward(model.loss(my_part()[:1]))
    zero.step()  # a first step makes the optimizer's states
    zero.zero_grad()
    with measure.LiveBytes(model, zero) as live:
        for micro_batch in my_part().chunk(2):
            zero.backward(model.loss(micro_batch) / 2)
        backward = len(live.timeline)
        zero.step()
        zero.zero_grad()
    return {"moments": [moment.live for moment in live.timeline], "backward": backward}


# %% tags=["nbval-ignore-output"]
STAGES = {"ZeRO-1": ZeRO1, "ZeRO-2": ZeRO2}
steps = {name: ranks.run(followed, args=(stage,))[0] for name, stage in STAGES.items()}
for name, step in steps.items():
    totals = [sum(live.values()) for live in step["moments"]]
    print(f"{name}: peak of backward {max(totals[: step['backward']]) / MIB:6.1f} MiB,", end=" ")
    print(f"of the update {max(totals[step['backward'] :]) / MIB:6.1f} MiB")


# %% [markdown]
# Drawn, moment after moment; both have the same scale. A vertical line ends the backwards.


# %% tags=["nbval-ignore-output"]
most = {
    name: max(live.get("gradients", 0) for live in step["moments"]) / MIB
    for name, step in steps.items()
}
alt = f"Live bytes in a step. ZeRO-1: gradients grow to {most['ZeRO-1']:.1f} MiB in the first "
alt += f"backward and stay until the end. ZeRO-2: they stay at {most['ZeRO-2']:.1f} MiB or below, "
alt += "with a few buckets on top while backward runs."
curves = {name: (step["moments"], step["backward"]) for name, step in steps.items()}
HTML(live_bytes(curves, alt))

# %% [markdown]
# Under ZeRO-1 gradients grow during the first backward and stay, through the second one and the
# update. Under ZeRO-2 a shard stays, and buckets come and go on top. Parameters, optimizer states
# and activations are the same. The spike at the right edge is the update, with AdamW's temporaries.
# "Other" is what backward and the update make on their way and let go: gradients on their way
# through layers, for example.

# %% [markdown]
# ## Accumulation
#
# Several micro-batches add up to one step. Where is the sum? DDP and ZeRO-1 add in `grad`, whole,
# and reduce once, at the end (`no_sync`). In ZeRO-2 `grad` is empty between micro-batches, and
# what a rank keeps is a shard. Only reduced gradients fit into it.
#
# Say `backward(loss)` does what your hooks do, and returns this rank's shard.
#
# ### Exercise 06-accumulate: Keep the sum in shards (4 points)


# %% exercise="06-accumulate"
def accumulate(model, backward, micro_batches):
    """This rank's shard of the gradient of all micro-batches. Runs on every rank.

    model: model(micro_batch) is the mean loss of this rank's micro-batch.
    backward: backward(loss) runs backward, reduces, frees, and returns [S], this rank's shard of
    the mean over ranks. (loss.backward() leaves whole gradients in grad, as under no_sync, and the
    next backward(loss) takes them along.)
    micro_batches: a list of tensors, equally large; their activations fit one at a time.
    Returns [S], the shard of the gradient of the mean loss over all of them: where two give
    [2., 4.] and [4., 0.] by themselves, it is [3., 2.]. At no time are all shards kept.
    """
    ### BEGIN SOLUTION
    total = 0
    for batch in micro_batches:
        loss = model(batch) / len(micro_batches)
        total += backward(loss)
    return total
    ### END SOLUTION


# %% check="06-accumulate"
check("06-accumulate", accumulate)

# %% [markdown]
# Small code, and a large consequence: each micro-batch is reduced. Now count. P elements once
# through a ring cost a rank (N-1)/N · P: that is one pass, P for short.
#
# - ZeRO-1: a reduce_scatter of the summed gradients, an all_gather of updated parameters.
# - ZeRO-2: as many reduce_scatters as there are micro-batches, and the same all_gather.
#
# To the byte, a shard is P/N *rounded up*, and a rank sends N - 1 of them in each of these.
#
# ### Exercise 06-volume: What a step sends (3 points)


# %% exercise="06-volume"
def volume(parameters, ranks, micro_batches, itemsize):
    """Bytes that a rank sends in one step.

    parameters, ranks, micro_batches: ints. itemsize: bytes of one element, for gradients and
    parameters alike.
    Returns {"zero1": …, "zero2": …}, ints. For 10 parameters on 4 ranks, 3 micro-batches, 2 bytes:
    a shard has 3 elements, P once through the ring costs 3 * 3 * 2 = 18 bytes, so "zero1" is 36.
    """
    ### BEGIN SOLUTION
    shard = -(-parameters // ranks)
    once = (ranks - 1) * shard * itemsize
    return {"zero1": 2 * once, "zero2": (micro_batches + 1) * once}
    ### END SOLUTION


# %% check="06-volume"
check("06-volume", volume)

# %% [markdown]
# With one micro-batch: 2P, what DDP's all_reduce sends, though gradients *and* parameters travel.
# With G of them: (G+1)P against 2P. ZeRO-2 buys memory with communication as soon as one
# accumulates.
#
# ## Run: equal to DDP, and the receipts
#
# Two AdamW steps on four ranks: DDP, and ZeRO-1 and 2 with one and with four micro-batches.


# %%
def optimized(stage):
    """The model, backward(loss), step() and zero_grad() of a stage; and what has its states."""
    model = models.build(lab)
    if stage is DDP:
        ddp, adamw = DDP(model, 4 * MIB), torch.optim.AdamW(model.parameters(), lr=1e-3)
        return ddp, torch.Tensor.backward, adamw
    zero = stage(model, torch.optim.AdamW, bucket_bytes=4 * MIB, lr=1e-3)
    return model, zero.backward, zero


# %% [markdown]
# The loop is the same for all. `held` is measured after a step, before gradients are set to zero.


# %%
def train(stage, micro_batches):
    """Two steps: the parameters, bytes at rest, and how much had been issued before the last."""
    module, backward, optimizer = optimized(stage)
    model = module.module if stage is DDP else module
    for _ in range(2):
        optimizer.zero_grad()
        issued = len(ranks.entries())
        for micro_batch in my_part().chunk(micro_batches):
            logits = module(micro_batch[:, :-1])  # [sequences, 16, vocabulary]
            targets = micro_batch[:, 1:].flatten()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets)
            backward(loss / micro_batches)
        optimizer.step()
    held = measure.model_state_bytes(model, optimizer)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return {"parameters": flat if dist.get_rank() == 0 else None, "held": held, "issued": issued}


# %%
runs = {
    (stage.__name__, micro_batches): ranks.run(train, args=(stage, micro_batches))
    for stage, micro_batches in ((DDP, 1), (ZeRO1, 1), (ZeRO1, 4), (ZeRO2, 1), (ZeRO2, 4))
}
base = runs["DDP", 1][0]["parameters"]
start = nn.utils.parameters_to_vector(models.build(lab).parameters()).detach()
print(f"two steps moved a parameter by up to {(base - start).abs().max():.1e}")
for (name, micro_batches), run in runs.items():
    off = (run[0]["parameters"] - base).abs()
    each = "micro-batch" if micro_batches == 1 else "micro-batches"
    print(f"{name:5}, {micro_batches} {each}: {(off < 1e-5).double().mean():.3%} as DDP's")

# %% [markdown]
# The same but for rounding: the order in which floats are added differs.
#
# **At rest.** Predict, with P parameters on N = 4 ranks in fp32: 4P of parameters, 4P/N of
# gradients, 8P/N of optimizer states, so 4P + 12P/N. Measured after a step, before zero_grad, with
# four micro-batches:

# %%
recipe = specs.Recipe("fp32", grad_accum=4)
predicted = ledger.model_states(lab, recipe, specs.Strategy("zero2", gpus=4)).by_category()
measure.receipt("ZeRO-2 at rest, fp32, each rank", predicted, measured=runs["ZeRO2", 4][0]["held"])

# %% [markdown]
# Difference 0, padding and step counters included. In ZeRO's own mixed precision parameters and
# gradients have 2 bytes, and 12 more for masters and moments: 2P + (2 + 12)P/N. That is the
# paper's **2P + 14P/N**.


# %%
def in_bf16():
    model = models.build(lab, dtype=torch.bfloat16)
    zero = ZeRO2(model, torch.optim.AdamW, lr=1e-3)
    zero.backward(model.loss(my_part()))
    zero.step()
    return measure.model_state_bytes(model, zero)


mixed = ledger.model_states(lab, specs.Recipe("zero-bf16"), specs.Strategy("zero2", gpus=4))
measured = ranks.run(in_bf16, world_size=4)[0]
print(f"2P + 14P/4 = {2 * lab.parameters + 14 * lab.parameters / 4:,.0f}")
measure.receipt("ZeRO-2 at rest, mixed precision, each rank", mixed.by_category(), measured)

# %% [markdown]
# **On the wire.** The ledger knows the model, the recipe and the buckets, and nothing of the run.
# Predict all four lines in units of P before you look: 3/4 · 4P = 3P bytes are one P through the
# ring.


# %%
def last_step(run):
    """The last step's log, without the all_reduce of one number: the gradients' norm."""
    return CollectiveLog(
        [entry for entry in entries[result["issued"] :] if entry.elements > 1]
        for entries, result in zip(run.log, run)
    )


logs = {key: last_step(run) for key, run in runs.items()}
predicted, measured = {}, {}
for name, micro_batches in [key for key in runs if key[0] != "DDP"]:
    recipe = specs.Recipe("fp32", grad_accum=micro_batches)
    strategy = specs.Strategy(name.lower(), gpus=4)
    plan = comm.step(lab, recipe, strategy, bucket_bytes=4 * MIB)
    line = f"{name}, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    predicted[line] = plan.bytes_per_rank
    measured[line] = sum(logs[name, micro_batches].bytes().values())
    print(f"{line}: counts agree: {plan.counts() == logs[name, micro_batches].counts()}")
measure.receipt("one step, sent by each rank", predicted, measured)

# %% [markdown]
# 2P, 2P, 2P, 5P; and the counts agree, too: one reduce_scatter for each bucket and
# micro-batch, one all_gather for each bucket. Drawn, ZeRO-2's step of four micro-batches:

# %% tags=["nbval-ignore-output"]
timeline(logs["ZeRO2", 4])

# %% [markdown]
# Four groups of reduce_scatters, each during a backward; then the update, and the all_gathers,
# with nothing left to hide them.
#
# ## Buckets have a price
#
# Small buckets pay latency (lesson 04). Large ones? They are memory: while backward runs, whole
# gradients lie in them. Measure the peak of backward, for buckets from 1 MiB to the whole model.


# %%
def peak_of_backward(stage, bucket_bytes):
    model = models.build(lab)
    zero = stage(model, torch.optim.AdamW, bucket_bytes=bucket_bytes)
    with measure.LiveBytes(model, zero) as live:
        zero.backward(model.loss(my_part()[:1]))
    return live.peak.total


def peaks():
    model = 4 * lab.parameters
    sizes = {"1 MiB": MIB, "4 MiB": 4 * MIB, "the model": model}
    return {"ZeRO-1": peak_of_backward(ZeRO1, MIB)} | {
        f"ZeRO-2, {name}": peak_of_backward(ZeRO2, nbytes) for name, nbytes in sizes.items()
    }


# %% tags=["nbval-ignore-output"]
for name, nbytes in ranks.run(peaks, world_size=4)[0].items():
    print(f"{name:24} {nbytes / MIB:6.1f} MiB")

# %% [markdown]
# Already with buckets of a fifth of the model ZeRO-2 needs *more* than ZeRO-1. A bucket is there
# several times: two travel while the next ones fill, and gloo's reduce_scatter works on a copy of
# its own (NCCL's does not). Only where a bucket is small against the model is the peak near its
# floor: parameters, a shard, activations.

# %% [markdown]
# It is no curiosity of this machine. DeepSpeed's `reduce_bucket_size` is 5e8 **elements** by
# default, and it allocates such a buffer whole in each backward, two with `overlap_comm`, however
# small the model. So compare, in bf16, while backward runs: ZeRO-1 with whole gradients, and
# ZeRO-2 with a shard and its buffers. (This gives ZeRO-1 no buffers, as if it reduced gradients in
# place.)
#
# ### Exercise 06-choose: When is ZeRO-1 the smaller one? (3 points)


# %% exercise="06-choose"
def in_backward(parameters, ranks, bucket, buffers):
    """Bytes of gradients and of reduce buffers on a rank, while backward runs.

    parameters, ranks: ints; a gradient has 2 bytes. bucket: elements of one buffer, allocated
    whole, however small the model. buffers: how many of these ZeRO-2 has.
    Returns {"zero1": bytes of whole gradients, "zero2": bytes of a shard, rounded up, and of the
    buffers, "smaller": "zero1" or "zero2"}. For 10 parameters, 4 ranks and two buffers of 6
    elements: 20, 2 * 3 + 2 * 12 = 30, and "zero1".
    """
    ### BEGIN SOLUTION
    zero1 = 2 * parameters
    zero2 = 2 * -(-parameters // ranks) + buffers * 2 * bucket
    return {"zero1": zero1, "zero2": zero2, "smaller": "zero1" if zero1 < zero2 else "zero2"}
    ### END SOLUTION


# %% check="06-choose"
check("06-choose", in_backward)

# %% [markdown]
# Below about 5e8 parameters a default bucket is larger than all that there is to shard; with two,
# below 1e9. A bucket is a setting: make it small against the model, and large against latency.

# %% [markdown]
# ## The three questions
#
# | question | ZeRO-2, against ZeRO-1 |
# |---|---|
# | What exactly is sharded that was not before? | The gradients: 1/N at rest and between micro-batches. They pass through buckets. |
# | Why does it save memory? | A rank updates its shard alone; once reduced, other gradients serve it nothing. 2P(1 - 1/N) less in mixed precision, if each is freed as it becomes ready. |
# | Why does it cost more? | With one micro-batch it does not: 2P. With G of them each is reduced: (G+1)P. And buckets are memory, too. |
#
# The largest line is now the parameters: 2P on every rank. Does a rank need all of them, all the
# time?

# %% [markdown]
# ## Say it out loud
#
# 1. What does a ZeRO-2 rank hold at rest, and what more in the middle of backward?
# 2. Why does sharding gradients cost no bytes on the wire, with one micro-batch?
# 3. You accumulate over 16 micro-batches on slow Ethernet, and the model fits under ZeRO-1. Which
#    do you take, and what is the ratio of bytes?
# 4. The weights are right, but memory is that of ZeRO-1. What do you look for?
# 5. Somebody turned on ZeRO-2 for a model of 100M parameters, and memory went *up*. Why?
# 6. Derive 2P + 14P/N, and say what it leaves out.

# %% [markdown]
# ## Summary
#
# - ZeRO-2 = ZeRO-1, and gradients are reduced to their owner and freed as they become ready.
# - 4P + 12P/N in fp32; 2P + 14P/N in mixed precision; buckets come on top while backward runs.
# - A gradient is freed when nothing refers to it: not a list, not a closure, not a view.
# - reduce_scatter + all_gather = the bytes of an all_reduce: 2P with one micro-batch.
# - Accumulation keeps sums in shards, so each of G micro-batches is reduced: (G+1)P.
# - Buckets: many small ones pay latency, large ones pay memory.
# - Proof is bytes and the log, not equal weights: DDP has equal weights, too.

# %% [markdown]
# ## Further reading
#
# - Rajbhandari et al. 2019, *ZeRO* (arXiv 1910.02054), sections 5.2 and 7: stage 2, and its
#   volume.
# - DeepSpeed's documentation, *ZeRO configuration*: `reduce_bucket_size`, `overlap_comm`,
#   `contiguous_gradients`.
# - PyTorch, `torch.Tensor.register_post_accumulate_grad_hook`: the hook on which all of this
#   stands.
#
# Next: lesson 07 shards the parameters, too.
