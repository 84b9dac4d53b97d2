# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 04 · DDP and its redundancy
#
# After this lesson you can
# - say how many of a job's bytes are there more than once, and show them;
# - write data parallelism from scratch: broadcast, average, hooks, buckets, overlap;
# - choose a bucket size, and say what limits it on both sides;
# - accumulate gradients with one synchronisation, and find out why losses differ;
# - read why one rank hangs.
#
# At the end one process, the course's DDP and PyTorch's give the same losses, and the bytes that both
# send are the ledger's: difference 0.
#
# Time: 60 to 90 minutes.

# %%
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib import comm, explorers, ledger, measure, models, ranks, specs
from course_lib.checks import check
from course_lib.figures.timeline import timeline
from course_lib.ranks.log import CollectiveLog
from course_lib.sharded.ddp import DDP

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# ## Play first
#
# Data parallelism averages gradients over the ranks with all-reduces. Backward computes gradients from
# the last layer to the first; those that are ready can travel while it goes on. They travel in
# *buckets*. What is still to send when backward has ended is **exposed**: it makes the step longer.
#
# Here GPT-2 trains on 64 H100s, eight to a node; each all-reduce goes by the fastest of ring, tree and
# hierarchy. Guess the best bucket size, then move the slider from end to end. What goes wrong at each?
# Then take 8 ranks, which share a node, or a slower link, or a larger model.

# %% tags=["explorer", "nbval-ignore-output"]
explorers.bucket_overlap()

# %% [markdown]
# Small buckets: many all-reduces, and each pays its latency. Large ones: they are full late, and
# nothing is left to hide behind. In between only the last bucket or two are exposed. On slow links no
# bucket helps: there are more bytes than backward has time for.
#
# ## Where the redundancy lives
#
# Data parallelism is the simplest way to use N ranks: each holds *everything* and works on its own
# part of the batch. Here is a small Llama and one batch for this whole lesson.

# %%
lab = replace(specs.model("lab-25m"), name="lab-7m", num_layers=3, vocab_size=1000)
tokens = torch.randint(lab.vocab_size, (8, 33), generator=torch.Generator().manual_seed(0))
print(f"{lab.parameters:,} parameters in {len(lab.tensors())} tensors")
print(f"a batch of {len(tokens)} sequences of {tokens.shape[1]} tokens")


# %% [markdown]
# A wrapper that averages gradients has to see forward and backward, so let forward give the loss.
# Each rank takes every N-th sequence.


# %%
class WithLoss(nn.Module):
    """A model whose forward gives its loss."""

    def __init__(self):
        super().__init__()
        self.model = models.build(lab)

    def forward(self, tokens):
        return self.model.loss(tokens)


def my_part():
    """This rank's sequences of the batch: [8 / ranks, 33]."""
    return tokens[dist.get_rank() :: dist.get_world_size()]


# %% [markdown]
# Four ranks take one AdamW step under DDP. Then each reports how many bytes of model states it holds,
# and a *fingerprint* of each tensor, so that we can tell whether they hold the same.


# %%
def fingerprints(model, optimizer):
    """(what, parameter's name, fingerprint, bytes) of every tensor of the model states."""
    for name, parameter in model.named_parameters():
        states = optimizer.state[parameter]
        for what, tensor in {"parameter": parameter, "grad": parameter.grad, **states}.items():
            content = tensor.detach().numpy().tobytes()
            yield what, name, sha256(content).hexdigest(), len(content)


def one_step():
    ddp = DDP(WithLoss())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    loss = ddp(my_part())
    loss.backward()
    optimizer.step()
    held = measure.model_state_bytes(ddp, optimizer)
    return {"loss": loss.item(), "held": held, "tensors": list(fingerprints(ddp, optimizer))}


steps = ranks.run(one_step, world_size=4)

# %%
for rank, step in enumerate(steps):
    print(f"rank {rank}: loss {step['loss']:.3f}, {sum(step['held'].values()):,} bytes")
same = set(steps[0]["tensors"]).intersection(*(step["tensors"] for step in steps))
print(f"{len(same)} of {len(steps[0]['tensors'])} tensors are the same on all ranks")

# %% [markdown]
# The losses differ, since each rank has its own data. All else is the same on all ranks, to the last
# bit. That is the redundancy. With N ranks and 16 bytes per parameter, how much is it?
#
# ### Exercise 04-redundancy: Count what is held more than once (3 points)


# %% exercise="04-redundancy"
def redundancy(parameters, ranks):
    """Of the model states that all ranks hold under DDP, how much is redundant?

    parameters, ranks: ints; each rank holds 16 bytes for each parameter.
    Returns {"held": bytes on all ranks together, "redundant": those beyond one copy,
    "fraction": redundant / held}: for 10 parameters on 4 ranks it is 640, 480 and 0.75.
    """
    ### BEGIN SOLUTION
    copy = 16 * parameters
    held = ranks * copy
    redundant = held - copy
    return {"held": held, "redundant": redundant, "fraction": redundant / held}
    ### END SOLUTION


# %% check="04-redundancy"
check("04-redundancy", redundancy)

# %% [markdown]
# The redundant fraction is 1 - 1/N: half on two ranks, 98% on 64. The receipt: predicted by the ledger,
# measured by content. A tensor that another rank holds too, bit by bit, counts as redundant.

# %%
copy = ledger.model_states(lab, specs.Recipe("fp32"), specs.Strategy("ddp", gpus=4)).total
held = sum(sum(step["held"].values()) for step in steps)
distinct = {tensor for step in steps for tensor in step["tensors"]}
once = sum(nbytes for *_, nbytes in distinct)
measure.receipt(
    "model states on four ranks",
    predicted={"one rank": copy, "all ranks": 4 * copy, "redundant": 3 * copy},
    measured={"one rank": held // 4, "all ranks": held, "redundant": held - once},
)

# %% [markdown]
# ZeRO removes these bytes, one line of the ledger after another. To see why that is possible, and what
# it costs, build first what keeps the copies equal.
#
# ## Equal at the start, equal after each step
#
# Copies stay equal if they *start* equal and each step *changes* them equally. The start is a
# broadcast: rank 0's parameters overwrite the others'.


# %%
def equal_start():
    layer = nn.Linear(2, 1)  # each rank draws its own
    before = layer.weight.detach().clone()
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, src=0)
    return before, layer.weight.detach()


for rank, (before, after) in enumerate(ranks.run(equal_start, world_size=3)):
    print(f"rank {rank}: {before.numpy().round(3)} → {after.numpy().round(3)}")

# %% [markdown]
# For equal steps the ranks need equal gradients. Which? Those of the whole batch. Its loss is the mean
# over B samples, of which each rank has B/N, so
#
# $$\nabla L = \frac1B\sum_{i=1}^{B}\nabla\ell_i = \frac1N\sum_{r=1}^{N}
# \Big(\frac{N}{B}\sum_{i\in r}\nabla\ell_i\Big)$$
#
# The bracket is what rank r computes from its own mean loss. So the ranks' gradients are **averaged**:
# AVG, not SUM. It is exact only where all ranks have equally many samples.
#
# ### Exercise 04-average: Average the gradients of all ranks (3 points)


# %% exercise="04-average"
def average_backward(model, loss):
    """Run backward, and average the gradients over all ranks. Runs on every rank.

    model: an nn.Module, the same on all ranks, whose gradients are zero.
    loss: the mean loss of this rank's data, a tensor; backward has not been called.
    Returns nothing. Afterwards each parameter.grad is the mean over ranks: where two
    ranks computed [1., 4.] and [3., 0.], both have [2., 2.]. The weights are untouched.
    """
    ### BEGIN SOLUTION
    loss.backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
    ### END SOLUTION


# %% check="04-average"
check("04-average", average_backward)

# %% [markdown]
# The check read the log, too: your answer sent each gradient once, and nothing else.
#
# Only gradients travel, 4 bytes for each parameter here. The optimizer then does the same work on every
# rank, with the same numbers: redundant work for redundant bytes.
#
# ## Buckets
#
# One all-reduce for each parameter is correct and slow: a norm's few hundred bytes pay as much latency
# as a matrix. So gradients are put together. In which order do they become ready? Ask backward itself,
# with a hook that is called when a gradient is complete.

# %%
model = models.build(lab)
names = {parameter: name for name, parameter in model.named_parameters()}
ready = []
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda p: ready.append(names[p]))
model.loss(tokens[:1]).backward()
print("first:", *ready[:4], sep="\n  ")
print("last:", *ready[-2:], sep="\n  ")

# %% [markdown]
# From the head back to the embedding: roughly the parameters in reverse. DDP goes through them so, adds
# each to the open bucket, and closes the bucket **when it has reached** the cap. A tensor is never
# split, so a bucket may be larger than the cap. The last one takes what is left.
#
# ### Exercise 04-buckets: Put gradients into buckets (3 points)


# %% exercise="04-buckets"
def fill_buckets(sizes, cap):
    """Put the gradients of a model into buckets, as backward computes them.

    sizes: the bytes of each gradient, in the order of model.parameters(), a list of ints.
    cap: bytes; a bucket is closed as soon as it holds as many or more.
    Returns a list of buckets, each a list of indices into sizes, the last parameter first:
    fill_buckets([4, 8, 4, 4], 8) is [[3, 2], [1], [0]].
    """
    ### BEGIN SOLUTION
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= cap:
            buckets.append(bucket)
            bucket, held = [], 0
    if bucket:
        buckets.append(bucket)
    return buckets
    ### END SOLUTION


# %% check="04-buckets"
check("04-buckets", fill_buckets)

# %% [markdown]
# PyTorch's caps are 25 MiB, and 1 MiB for the first bucket: communication starts early. With the
# course's own version, and smaller caps for our small model:

# %%
sizes = [4 * tensor.numel for tensor in lab.tensors()][::-1]  # the last parameter first
for cap in (2**10, 4 * 2**20, 25 * 2**20):
    buckets = comm.buckets(sizes, cap)
    filled = [specs.human(sum(sizes[i] for i in bucket), 1) for bucket in buckets]
    shown = filled[:4] + ["…"] * (len(filled) > 4)
    print(f"cap {specs.human(cap, 0):7}{len(buckets):3} buckets:", ", ".join(shown))

# %% [markdown]
# ## Overlap
#
# Three tools, then you put them together. An all-reduce with `async_op=True` returns at once; its
# result is there after `work.wait()`. `parameters_to_vector` copies tensors into one flat one, and
# `vector_to_parameters` copies them back.


# %%
def three_tools():
    gradients = [torch.ones(2, 2), torch.ones(3)]
    flat = parameters_to_vector(gradients)  # [7]
    work = dist.all_reduce(flat, async_op=True)
    # … here backward would go on …
    work.wait()
    vector_to_parameters(flat, gradients)
    return gradients


ranks.run(three_tools, world_size=2)[0]

# %% [markdown]
# Until `wait` has returned, nobody may read `flat`: it may hold the sum, or a part of it.
#
# Now write the heart of DDP. The check reads the log: one all-reduce for each bucket, started while
# backward still had gradients to compute, and waited for only afterwards. It takes two steps, so what
# you note in one must not spoil the next.
#
# ### Exercise 04-hooks: Communicate while backward runs (5 points)


# %% exercise="04-hooks"
def overlap(buckets):
    """Make backward average gradients while it runs. Runs on every rank, before training.

    buckets: lists of parameters, in the order in which backward fills them. The hook that
    completes a bucket starts one all_reduce, of its gradients as one flat tensor, and goes on.
    Returns finish(), which is called after each backward: it waits for all of them, and leaves
    the mean over ranks in every parameter.grad. Between steps gradients are set to zero.
    [[w3, w2], [w1]] give two all_reduces; the first starts before w1.grad is there.
    """
    ### BEGIN SOLUTION
    arrived, started = set(), []

    def on_gradient(bucket, parameter):
        arrived.add(parameter)
        if arrived.issuperset(bucket):
            flat = parameters_to_vector([p.grad for p in bucket]) / dist.get_world_size()
            started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for bucket, flat, work in started:
            work.wait()
            vector_to_parameters(flat, [p.grad for p in bucket])
        arrived.clear(), started.clear()

    for bucket in buckets:
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, bucket))
    return finish
    ### END SOLUTION


# %% check="04-hooks"
check("04-hooks", overlap)

# %% [markdown]
# That is DDP. The course's version, `course_lib.sharded.ddp`, is what you wrote and three things more:
# it keeps gradients *in* the flat tensors, as views, which saves the copies; it learns the true order in
# the first backward; and all ranks start buckets in the same order, whatever is ready first. Read it.
#
# ## Accumulation
#
# A batch that does not fit is cut into micro-batches, whose gradients add up in `grad` before one step.
# Averaging once, at the end, is enough: the mean of sums is the sum of means. Under `ddp.no_sync()`,
# where forward and backward both belong, nothing is sent.
#
# ### Exercise 04-accumulate: Accumulate with one synchronisation (3 points)


# %% exercise="04-accumulate"
def accumulate(ddp, micro_batches):
    """Leave the gradient of all micro-batches on all ranks. Runs on every rank.

    ddp: wraps a model; ddp(micro_batch) is the mean loss of this rank's micro-batch. Where that
    forward ran outside of ddp.no_sync(), its backward averages over ranks what grad has by then.
    micro_batches: a list of tensors, equally large; their activations fit one at a time.
    Returns nothing. Afterwards each parameter.grad is the gradient of the mean loss over all
    of them on all ranks. With 4 micro-batches, three stay local and one synchronises.
    """
    ### BEGIN SOLUTION
    for number, batch in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with nullcontext() if last else ddp.no_sync():
            loss = ddp(batch) / len(micro_batches)
            loss.backward()
    ### END SOLUTION


# %% check="04-accumulate"
check("04-accumulate", accumulate)

# %% [markdown]
# ### Why do the losses differ?
#
# The most frequent question about accumulation. Two mistakes, each easy to make: the losses are not
# divided (SUM for AVG), or something sets the gradients to zero in between (only the last micro-batch is
# kept). Predict how far each moves the losses, with SGD and with AdamW.


# %%
def losses(optimizer_class, lr, divide=True, keep=True):
    """The loss before each of three steps, on two micro-batches each; averaged over ranks."""
    ddp, halves = DDP(WithLoss()), my_part().chunk(2)
    optimizer = optimizer_class(ddp.parameters(), lr=lr)
    seen = torch.zeros(3)
    for step in range(3):
        optimizer.zero_grad()
        for half, context in zip(halves, (ddp.no_sync(), nullcontext())):
            if not keep:
                optimizer.zero_grad()
            with context:
                loss = ddp(half)
                (loss / 2 if divide else loss).backward()
            seen[step] += loss.detach() / 2
        optimizer.step()
    dist.all_reduce(seen)
    return (seen / dist.get_world_size()).tolist()


# %% tags=["nbval-ignore-output"]
VARIANTS = {"right": {}, "not divided": {"divide": False}, "only the last": {"keep": False}}


def compare(optimizer_class, lr):
    return {name: losses(optimizer_class, lr, **wrong) for name, wrong in VARIANTS.items()}


for optimizer_class, lr in ((torch.optim.SGD, 0.6), (torch.optim.AdamW, 1e-3)):
    table = ranks.run(compare, world_size=2, args=(optimizer_class, lr))[0]
    for name, row in table.items():
        print(f"{optimizer_class.__name__:6} {name:14}", *(f"{loss:7.3f}" for loss in row))

# %% [markdown]
# All variants start alike: the first loss tells nothing, the second does. With SGD a sum is a step twice
# as long. AdamW divides by the gradient's own size and hides it, until something uses that size: a
# clipped or logged gradient norm, say. Only the last micro-batch is worse: half of the data is never
# learned from, and no error says so.
#
# ## Run: one process, your DDP, PyTorch's
#
# Four ranks with a quarter of the batch each must take the steps that one process takes on all of it.


# %%
MIB = 2**20


def alone(model):
    return model


def ours(model):
    return DDP(model, bucket_bytes=4 * MIB)


def pytorchs(model):
    return DistributedDataParallel(model, bucket_cap_mb=4)


def train(wrap):
    """Four AdamW steps: the losses, and how many collectives had been issued before the last."""
    model = wrap(WithLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        issued = len(ranks.entries())
        optimizer.zero_grad()
        loss = model(my_part())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, issued


# %%
runs = {
    "one process": ranks.run(train, world_size=1, args=(alone,)),
    "our DDP": ranks.run(train, world_size=4, args=(ours,)),
    "PyTorch's": ranks.run(train, world_size=4, args=(pytorchs,)),
}

# %%
for name, run in runs.items():
    mean = [sum(step) / len(run) for step in zip(*(losses for losses, _ in run))]
    print(f"{name:12}", *(f"{loss:8.4f}" for loss in mean))

# %% [markdown]
# The same, up to the last digits: the order in which floats are added differs.
#
# ## The receipt: what was sent
#
# Predict. Every gradient crosses in one all-reduce, and a ring all-reduce of E elements takes each rank
# 2(N-1)/N of its bytes: with P parameters in fp32, $2\cdot\frac{3}{4}\cdot 4P = 6P$ bytes a step. The
# ledger of communication says how many all-reduces there are, and rounds chunks up.

# %%
plan = comm.step(lab, specs.Recipe("fp32"), specs.Strategy("ddp", gpus=4), bucket_bytes=4 * MIB)
print(f"6P = {6 * lab.parameters:,} bytes")
plan

# %% [markdown]
# Measure. `run.log` has all that each rank sent; take the last step of both DDPs.


# %%
def last_step(run):
    return CollectiveLog(entries[issued:] for entries, (_, issued) in zip(run.log, run))


step = {name: last_step(run) for name, run in runs.items()}
for name, log in step.items():
    print(f"{name:12}", log)
measure.receipt(
    "one step, on each rank",
    predicted={name: plan.bytes_by_kind()["all_reduce"] for name in ("our DDP", "PyTorch's")},
    measured={name: step[name].bytes()["all_reduce"] for name in ("our DDP", "PyTorch's")},
)

# %% [markdown]
# Difference 0, in bytes and in number. When did they travel? A bar is an all-reduce, from its start to
# its end; bars above each other were under way at the same time.

# %% tags=["nbval-ignore-output"]
timeline(step["our DDP"])

# %% [markdown]
# They start one after another, as backward fills the buckets. On this machine ranks share two or more
# cores, so times say little; the order is that of a cluster.
#
# And before the first step? The broadcast of the parameters, and
# what the two DDPs tell each other once.

# %%
for name in ("our DDP", "PyTorch's"):
    log = runs[name].log
    print(f"{name:12}", dict(Counter(entry.kind for entry in log[0]) - Counter(step[name].counts())))

# %% [markdown]
# ## Why did one rank hang?
#
# A collective needs all ranks. If one of them has a sample fewer, it takes a step fewer, and calls an
# all-reduce fewer; the others wait for it. On a cluster the job stands still, without an error, until a
# timeout ends it, ten minutes later or more. Here rank 2 skips a sample. Read who waits where:


# %% tags=["raises-exception", "nbval-ignore-output"]
def one_skips_a_sample():
    ddp = DDP(nn.Linear(4, 1))
    for sample in range(3):
        if dist.get_rank() == 2 and sample == 1:
            continue  # "this one is broken, leave it out"
        ddp(torch.ones(1, 4)).sum().backward()


ranks.run(one_skips_a_sample, world_size=4)

# %% [markdown]
# Nothing failed where the mistake was: at the skipped sample rank 2's third gradient was averaged with
# the others' second one. The hang comes later, at the end of the data. So look for what made the ranks
# take different numbers of steps, not at the line where they wait.
#
# The remedy: the same number of steps on all ranks. Give each equally many samples (PyTorch's
# `DistributedSampler` pads), or let the rank that skips one call backward on a loss of zero.

# %% [markdown]
# ## The three questions
#
# They are asked at every stage from here on. At stage 0:
#
# | question | DDP |
# |---|---|
# | What exactly is sharded that was not before? | The batch, and with it the activations. No model states. |
# | Why does it save memory? | It saves none: 16P on every rank, 1 - 1/N of it redundant. |
# | Why does it cost more? | Against one GPU: an all-reduce of all gradients in each step, 2(N-1)/N of their bytes, mostly hidden. |
#
# ZeRO-1 begins with the largest line: does every rank need all of the optimizer's states?

# %% [markdown]
# ## Say it out loud
#
# 1. What does each DDP rank hold, what does it send, and how much of both is redundant?
# 2. Why are gradients averaged, and not weights, nor losses?
# 3. What goes wrong with buckets of 1 MiB, and with buckets of 10 GiB?
# 4. The numbers are right, but the step is slow: the log has 300 all-reduces. What happened?
# 5. Losses change when you go from one micro-batch to four. What do you check first?
# 6. A job of 512 ranks stands still, with no error. What do you ask?

# %% [markdown]
# ## Summary
#
# - DDP: everything on every rank; a fraction of 1 - 1/N is redundant.
# - Equal start (broadcast), equal steps (averaged gradients): equal copies, with no further messages.
# - AVG, not SUM; after backward; of every gradient; on every rank.
# - Buckets trade latency against overlap; the last one is always exposed.
# - A step sends 2(N-1)/N of the gradients' bytes per rank, however many micro-batches it has.
# - All ranks, the same collectives, the same order: or all of them wait.

# %% [markdown]
# ## Further reading
#
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*
#   (arXiv 2006.15704): bucketing, overlap and `no_sync`, with measurements.
# - PyTorch's notes *Distributed Data Parallel*: how the reducer keeps its order.
# - Rajbhandari et al. 2019 (arXiv 1910.02054), section 3: the redundancy, and what to do about it.
#
# Next: lesson 05 shards the optimizer states.
