# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 05 · ZeRO-1
#
# After this lesson you can
# - say what a rank of ZeRO-1 holds: 4P + 12P/N bytes, and when it is 8P + 8P/N;
# - cut all parameters as one flat space, with padding, and say which rank owns what;
# - build ZeRO-1 out of DDP: reduce-scatter, update your shard, all-gather;
# - clip by a norm of which each rank has a part;
# - say what it costs, and when the same bytes take longer.
#
# At the end DDP and ZeRO-1 have the same parameters, and its memory and messages are the ledger's:
# difference 0.
#
# Time: 45 to 75 minutes.

# %%
from dataclasses import replace
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import HTML, display
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib import comm, explorers, ledger, measure, models, ranks, specs
from course_lib.checks import check
from course_lib.figures.bars import StackedBars
from course_lib.figures.image import image_html, new_figure
from course_lib.figures.timeline import timeline
from course_lib.ranks.log import CollectiveLog
from course_lib.sharded.ddp import DDP
from course_lib.sharded.zero1 import ZeRO1

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# ## Play first
#
# Under DDP every rank holds all of this. ZeRO-1 cuts the dark part, the optimizer's states, into N
# shards. Llama 3 8B on 64 GPUs; guess before you move anything: with how many ranks does it fit into
# 80 GiB? How small can it get, with as many ranks as you like? Then take fp32, and SGD.

# %% tags=["explorer", "nbval-ignore-output"]
explorers.memory_ledger(stage="zero1", ranks=64)

# %% [markdown]
# Two ranks would do, if there were no activations. Beyond 64 hardly anything changes: weights and
# gradients remain, whole, on every rank. (Plain SGD in fp32 keeps no states: nothing to shard.)
#
# ## The formula
#
# P is a number of elements. Mixed-precision AdamW keeps 16 bytes for each: 2 for the weight, 2 for
# the gradient, and 12 that only the update needs, an fp32 master and two moments. ZeRO-1 keeps the
# 12 once, not N times:
#
# $$4P + \frac{12P}{N}$$
#
# (Rajbhandari et al. 2020, section 5.1.) In fp32 it is 16 bytes too, but 4 + 4 + 8: no master.
#
# ### Exercise 05-bytes: Bytes on a rank of ZeRO-1 (2 points)


# %% exercise="05-bytes"
def zero1_bytes(parameters, ranks, mixed):
    """Bytes of model states on one rank of ZeRO-1, with AdamW.

    parameters, ranks: ints; ranks divides parameters. mixed: True for 16-bit weights and
    gradients with fp32 masters, False for fp32 throughout.
    Returns bytes: for 1000 parameters on 4 ranks 7000 if mixed, and 10,000 if not.
    """
    ### BEGIN SOLUTION
    if mixed:
        weight, gradient, states = 2, 2, 4 + 4 + 4  # states: master, momentum, variance
    else:
        weight, gradient, states = 4, 4, 4 + 4
    return (weight + gradient) * parameters + states * parameters // ranks
    ### END SOLUTION


# %% check="05-bytes"
check("05-bytes", zero1_bytes)

# %% [markdown]
# The same from the ledger, for Llama 3 8B. Twice the ranks, half of the dark part; the rest stays.

# %%
llama = specs.model("llama3-8b")
recipe = specs.Recipe("zero-bf16")
jobs = {"DDP, any N": specs.Strategy("ddp", gpus=64)}
jobs |= {f"ZeRO-1, N = {n}": specs.Strategy("zero1", gpus=n) for n in (2, 4, 8, 64)}
held = {name: ledger.model_states(llama, recipe, job) for name, job in jobs.items()}
for name, states in held.items():
    per_parameter = states.total / llama.parameters
    print(f"{name:15}{specs.human(states.total, 1):>12} {per_parameter:6.2f} bytes per parameter")

# %%
figure = new_figure()
figure.subplots_adjust(left=0.17)
categories = ("parameters", "gradients", "optimizer_states")
bars = StackedBars(figure.add_subplot(), list(held), categories)
bars.update([s.by_category() for s in held.values()], chosen=4, capacity=80 * 2**30, name="80 GiB")
for label in figure.axes[0].texts:  # on white, where the line passes
    label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
alt = "GiB on each rank: DDP 119.7; ZeRO-1 74.8, 52.4, 41.1 and 31.3 on 2, 4, 8 and 64 ranks. "
alt += "Parameters and gradients, 15 each, stay; optimizer states shrink from 89.7 to 1.4."
HTML(image_html(figure, alt))

# %% [markdown]
# Activations are not in it: the 5 GiB that two ranks leave are soon gone.
#
# ## Why the states can be cut
#
# AdamW computes a new weight from that weight, its gradient and its own two moments: element by
# element. Whoever updates one half needs nothing of the other half. Try it: one optimizer for all,
# against two for a half each.


# %%
def adamw_steps(*parts):
    """Three AdamW steps, each part of the weights with an optimizer of its own."""
    parts = [nn.Parameter(part.clone()) for part in parts]
    optimizers = [torch.optim.AdamW([part], lr=0.1) for part in parts]
    for _ in range(3):
        for part, optimizer in zip(parts, optimizers):
            part.grad = part.detach() ** 2
            optimizer.step()
    return torch.cat([part.detach() for part in parts])


weights = torch.linspace(-1, 1, 8)
torch.equal(adamw_steps(weights), adamw_steps(*weights.chunk(2)))

# %% [markdown]
# To the last bit. So the cut may be anywhere, within a matrix too. (Optimizers that look at a whole
# tensor, such as Adafactor, Muon or LAMB, do not allow that.)
#
# ## One flat space
#
# Tensors have all sizes. To give each rank the same work, forget them: lay all P elements end to end,
# in the order of `model.parameters()`, in one **flat space**, and cut. Collectives want equal parts,
# so round up, $S = \lceil P/N \rceil$, and pad with zeros to N·S. Seven elements on three ranks:
#
# | rank 0 | rank 1 | rank 2 |
# |---|---|---|
# | 0 1 2 | 3 4 5 | 6 · · |
#
# ### Exercise 05-partition: Cut a flat buffer, with padding (3 points)


# %% exercise="05-partition"
def shard_of(values, rank, world_size):
    """This rank's shard of a flat tensor.

    values: a tensor [P], P at least 1. rank, world_size: ints; rank counts from 0.
    Returns a tensor [S], S = P / world_size rounded up: S elements in a row, and zeros where a
    rank has fewer, or none. Of [1., 2., 3., 4., 5.] on 4 ranks, rank 2 has [5., 0.] and rank 3
    [0., 0.].
    """
    ### BEGIN SOLUTION
    size = -(-len(values) // world_size)  # S
    padded = F.pad(values, (0, size * world_size - len(values)))  # [N·S]
    return padded[rank * size : (rank + 1) * size]
    ### END SOLUTION


# %% check="05-partition"
check("05-partition", shard_of)

# %% [markdown]
# On five elements and four ranks, rank 3 owns padding alone: an *empty* shard. It takes part in all
# collectives nevertheless.
#
# From here on, this does the padding, in one line; `-P % N` is what P lacks to a multiple of N.


# %%
def padded(tensors, n):
    """Tensors end to end, and zeros up to a multiple of n: [N·S]."""
    flat = parameters_to_vector(tensors).detach()
    return F.pad(flat, (0, -len(flat) % n))


lab = replace(specs.model("lab-25m"), name="lab-7m", num_layers=3, vocab_size=1000)
model = models.build(lab)
P, NS = lab.parameters, len(padded(model.parameters(), n=4))
print(f"{P:,} parameters, padded to {NS:,}: {NS // 4:,} on each of 4 ranks, {NS - P} of them zero")

# %% [markdown]
# Who owns what? Here are the tensors that have more than one owner.

# %%
S = NS // 4
owners = {name: [] for name, _ in model.named_parameters()}
start = 0
for name, parameter in model.named_parameters():
    stop = start + parameter.numel()
    owners[name] = list(range(start // S, (stop - 1) // S + 1))
    start = stop
cut = {name: by for name, by in owners.items() if len(by) > 1}
for name, by in cut.items():
    print(f"{name:36} ranks {' and '.join(map(str, by))}")
print(f"the other {len(owners) - len(cut)} tensors have one owner each")

# %% [markdown]
# Cuts fall within tensors. Nobody minds: the optimizer sees a flat shard, and no tensors.
#
# A weight that two layers share (tied embeddings) is *one* parameter: `model.parameters()` gives it
# once. Whoever walks through the layers finds it twice.

# %%
tied = models.build(replace(lab, tied_embeddings=True))
once = sum(p.numel() for p in tied.parameters())
by_module = sum(p.numel() for m in tied.modules() for p in m.parameters(recurse=False))
print(f"parameters() {once:,}, module by module {by_module:,}: {by_module - once:,} twice")

# %% [markdown]
# ## Update your shard only
#
# DDP all-reduces: every rank gets the mean of *all* gradients. An owner needs the mean of its shard
# alone, and that is a reduce-scatter, half of an all-reduce. The buffer that goes in has N rows of S;
# rank r gets the sum of the rows r. (`reduce_scatter_single` is also known as
# `reduce_scatter_tensor`.)


# %%
def rows_to_owners():
    whole = torch.arange(4.0) + 10 * dist.get_rank()  # [N·S], N = S = 2
    shard = torch.empty(2)  # [S]
    dist.reduce_scatter_single(shard, whole)
    return whole, shard


for rank, (whole, shard) in enumerate(ranks.run(rows_to_owners, world_size=2)):
    print(f"rank {rank}: {whole.tolist()} → {shard.tolist()}")

# %% [markdown]
# One trap, which no wrong number will tell you of. A slice is a *view*: it keeps all of the buffer
# behind it alive.

# %%
whole = torch.zeros(1000)
for name, shard in {"slice": whole[:250], "clone": whole[:250].clone()}.items():
    print(f"{name}: {len(shard)} elements, {shard.untyped_storage().nbytes():,} bytes kept alive")

# %% [markdown]
# Now the heart of ZeRO-1. `make_optimizer` makes an optimizer for the parameters that it is given: give
# it your shard, an `nn.Parameter` of S elements. The check measures, on each rank, the optimizer's
# bytes and what else stays alive, and reads the log.
#
# ### Exercise 05-update: Update your shard only (5 points)


# %% exercise="05-update"
def sharded_optimizer(model, make_optimizer):
    """An optimizer of which each rank has 1/N. Runs on every rank, before training.

    model: the same on all ranks; P parameters. make_optimizer([parameter, …]): an optimizer.
    Returns update(), which is called after each backward, when every p.grad is this rank's own.
    update() updates this rank's shard [S] of the parameters by the mean over ranks of the
    gradients, and returns the new shard; it leaves the model as it is. With 10 parameters on 4
    ranks S is 3, and AdamW's moments have 2·3 elements on each. Besides the model and its grads,
    nothing of P elements is alive after update().
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = padded(model.parameters(), n).view(n, -1)  # [N, S]
    shard = nn.Parameter(rows[rank].clone())  # [S]
    optimizer = make_optimizer([shard])

    def update():
        gradients = padded([p.grad for p in model.parameters()], n)  # [N·S]
        shard.grad = torch.empty_like(shard)  # [S]
        dist.reduce_scatter_single(shard.grad, gradients / n)
        optimizer.step()
        return shard.detach()

    return update
    ### END SOLUTION


# %% check="05-update"
check("05-update", sharded_optimizer)

# %% [markdown]
# Your shard is a second copy of some parameters. With 16-bit parameters you need it, in fp32: it is the
# master. In fp32 it costs 4P/N bytes for nothing, so the course's version cuts it out of the parameters at
# each step, and frees it.
#
# ## Put the parameters back together
#
# Each rank has updated its own shard, and no rank has a whole model. An all-gather gives everybody
# everything: shards of S go in, and [N·S] comes out, rank 0's shard first. (Also known as
# `all_gather_into_tensor`.)


# %%
def to_all():
    mine = torch.arange(2.0) + 10 * dist.get_rank()  # [S]
    everyones = torch.empty(4)  # [N·S]
    dist.all_gather_single(everyones, mine)
    return mine, everyones


for rank, (mine, everyones) in enumerate(ranks.run(to_all, world_size=2)):
    print(f"rank {rank}: {mine.tolist()} → {everyones.tolist()}")

# %% [markdown]
# ### Exercise 05-gather: Put the parameters back together (3 points)


# %% exercise="05-gather"
def put_together(model, shard):
    """Write all ranks' shards into the model's parameters. Runs on every rank.

    model: P parameters in all. shard: a tensor [S], this rank's S of the N·S elements of the
    parameters, end to end and padded. Returns nothing.
    With a model of 5 parameters, and the shards [1., 2.], [3., 4.] and [5., 0.] on 3 ranks, the
    parameters are 1 to 5 on all of them. The nn.Parameters stay the same objects.
    """
    ### BEGIN SOLUTION
    whole = shard.new_empty(dist.get_world_size() * len(shard))  # [N·S]
    dist.all_gather_single(whole, shard)
    vector_to_parameters(whole, model.parameters())  # the first P of them
    ### END SOLUTION


# %% check="05-gather"
check("05-gather", put_together)

# %% [markdown]
# Backward, `update`, `put_together`: that is ZeRO-1. After it the copies are equal, bit by bit, since
# each element was computed once, by its owner. Under DDP they are equal because all compute the same.
#
# ## The norm of what nobody has
#
# Clipping scales the gradient by max_norm / norm where its norm is larger. Whose norm? That of the
# whole gradient, of which each rank has a shard. Squares add up over the shards, so one number per
# rank is enough.
#
# ### Exercise 05-clip: Clip by the global norm (4 points)


# %% exercise="05-clip"
def clip_shard(gradient, max_norm):
    """Clip the gradient, of which this rank has a shard, to max_norm. Runs on every rank.

    gradient: a tensor [S], this rank's shard of the mean gradient, zeros for padding; it is
    scaled in place, by the same factor on all ranks. max_norm: a number.
    Returns the norm of the whole gradient, before it was clipped. Shards [3.] and [4.] have
    the norm 5: with max_norm 1 they become [0.6] and [0.8], with max_norm 10 they stay.
    """
    ### BEGIN SOLUTION
    squares = gradient.square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm.item()
    ### END SOLUTION


# %% check="05-clip"
check("05-clip", clip_shard)

# %% [markdown]
# ### Why is the gradient norm wrong?
#
# Squares add up over *shards*. Where ranks hold copies, the same sum counts each element N times. Let
# four ranks hold the same gradient, of norm 5:


# %%
def summed_over_replicas():
    everyones = torch.tensor([3.0, 4.0])  # a gradient after DDP's all_reduce
    total = (everyones**2).sum()
    dist.all_reduce(total)
    return total.item() ** 0.5


ranks.run(summed_over_replicas, world_size=4)[0]

# %% [markdown]
# Too large by $\sqrt{4}$. It happens where a job has shards and replicas (groups of ranks that shard
# among themselves, and hold copies of each other's shards: HSDP), or where some parameters are not
# sharded: sum over the ranks of one sharding group only.

# %% [markdown]
# ## Run: DDP and ZeRO-1
#
# `course_lib.sharded.zero1` is what you wrote, and more: buckets, so that only a part of the flat
# space is in a buffer at a time; fp32 masters of 16-bit parameters; groups; inf and nan. Read it:
# course_lib/sharded/zero1.py.
#
# One thing differs: with buckets a rank owns a piece of each bucket, not one stretch of the flat
# space, and the last parameters come first. S elements it is all the same; lesson 06 shows why.
#
# The run: four ranks, three AdamW steps on the same batch.


# %%
class WithLoss(nn.Module):
    """A model whose forward gives its loss."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.model = models.build(lab, dtype=dtype)

    def forward(self, tokens):
        return self.model.loss(tokens)


tokens = torch.randint(lab.vocab_size, (8, 33), generator=torch.Generator().manual_seed(0))
MIB = 2**20


def my_part():
    """This rank's sequences of the batch: [8 / ranks, 33]."""
    return tokens[dist.get_rank() :: dist.get_world_size()]


# %% [markdown]
# Both wrappers, behind one small interface: after `forward_backward` comes `update`.


# %%
def ddp(dtype):
    model = DDP(WithLoss(dtype), bucket_bytes=4 * MIB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, lambda: model(my_part()).backward()


def zero1(dtype):
    model = WithLoss(dtype)
    zero = ZeRO1(model, torch.optim.AdamW, bucket_bytes=4 * MIB, lr=1e-3)
    return model, zero, lambda: zero.backward(model(my_part()))


# %%
def train(start, dtype=torch.float32):
    """Three steps. Parameters at the end, bytes held, and what was issued by when in the last."""
    model, optimizer, forward_backward = start(dtype)
    for _ in range(3):
        optimizer.zero_grad()
        begin = len(ranks.entries())
        forward_backward()
        backward_done = len(ranks.entries())
        optimizer.step()
    parameters = parameters_to_vector(model.parameters()).detach()
    return {
        "parameters": parameters if dist.get_rank() == 0 else None,
        "fingerprint": sha256(parameters.view(torch.uint8).numpy()).hexdigest(),
        "held": measure.model_state_bytes(model, optimizer),
        "begin": begin,
        "backward done": backward_done,
    }


runs = {"DDP": ranks.run(train, args=(ddp,)), "ZeRO-1": ranks.run(train, args=(zero1,))}

# %%
for name, run in runs.items():
    print(f"{name:7} {len({r['fingerprint'] for r in run})} set of parameters on 4 ranks")
ours, theirs = (run[0]["parameters"] for run in runs.values())
print("the same in both, up to 1e-5:", torch.allclose(ours, theirs, atol=1e-5))

# %% [markdown]
# ## The receipt: what was held
#
# Predict: in fp32, 4P + 4P + 8P bytes for DDP, and 4P + 4P + 8P/4 for ZeRO-1 (and 4 more, AdamW's
# count of steps, one for the flat shard). Measured from the tensors' storages, on each rank; here is
# rank 3's, whose shard ends in padding.


# %%
def predicted(strategy, precision="fp32"):
    job = specs.Recipe(precision), specs.Strategy(strategy, gpus=4)
    return ledger.model_states(lab, *job).by_category()


for name, strategy in {"DDP": "ddp", "ZeRO-1": "zero1"}.items():
    states = runs[name][3]["held"]
    display(measure.receipt(f"{name}, rank 3 of 4, fp32", predicted(strategy), states))

# %% [markdown]
# Difference 0, and the optimizer's line is a quarter. Now the mixed precision of the formula: bf16
# parameters and gradients, fp32 masters. It should come to 4P + 12P/4 = 7P.

# %%
mixed = ranks.run(train, args=(zero1, torch.bfloat16))
print(f"7P = {7 * P:,} bytes; on each rank {[sum(r['held'].values()) for r in mixed]}")
measure.receipt("ZeRO-1, rank 3 of 4, bf16", predicted("zero1", "zero-bf16"), mixed[3]["held"])

# %% [markdown]
# The ten bytes above 7P are padding's share, half an element of 12 bytes, and the count of steps.
#
# ## The receipt: what was sent
#
# DDP's all-reduce *is* a reduce-scatter and an all-gather. ZeRO-1 does the same two, and updates in
# between. How many bytes, against DDP's?

# %%
strategies = {"DDP": specs.Strategy("ddp", gpus=4), "ZeRO-1": specs.Strategy("zero1", gpus=4)}
plans = {
    name: comm.step(lab, specs.Recipe("fp32"), strategy, bucket_bytes=4 * MIB)
    for name, strategy in strategies.items()
}
for name, plan in plans.items():
    print(f"{name:7} {sum(plan.bytes_by_kind().values()):,} bytes per rank and step")
plans["ZeRO-1"]


# %% [markdown]
# As many, but for padding: two passes over the elements, of which a ring sends 3/4 each, of 4 bytes
# each: 2·3/4·4P = 6P bytes. Measured, in the last step; the all-reduce of the norm is not on the
# ledger. It is one number of 8 bytes; 48 sent, as a ring cuts nothing smaller than an element:
# 2·3·8.


# %%
def last_step(run):
    return CollectiveLog(entries[r["begin"] :] for entries, r in zip(run.log, run))


log = last_step(runs["ZeRO-1"])
print(log)
measure.receipt(
    "ZeRO-1, one step, on each rank",
    predicted=plans["ZeRO-1"].bytes_by_kind(),
    measured={kind: sent for kind, sent in log.bytes().items() if kind != "all_reduce"},
)

# %% tags=["nbval-ignore-output"]
timeline(log)

# %% [markdown]
# First all gradients go to their owners, bucket by bucket; then the norm; then the update, the gap
# in which nothing is sent; then the parameters come back.
#
# ## Why it costs more
#
# The bytes are the same, and it can still be slower. Count what had been issued when backward ended:

# %%
for name, run in runs.items():
    entries, r = run.log[0], run[0]
    during = r["backward done"] - r["begin"]
    after = len(entries) - r["backward done"]
    print(f"{name:7} during backward {during}, after it {after}")

# %% [markdown]
# DDP hides its all-reduces behind backward. Here nothing is hidden. The reduce-scatters could be, as
# lesson 06 does; the all-gathers could not: they follow the update, and with clipping the update
# needs the norm of *all* gradients. (FSDP, PyTorch's ZeRO-3, hides gathers behind the *next
# forward*, a few layers at a time: lesson 07.)
#
# One thing gets cheaper: each rank computes 1/N of the update.
#
# With accumulation nothing changes: micro-batches add up in `grad`, nothing is sent, and one step
# pays once.

# %% [markdown]
# ## The three questions
#
# | question | ZeRO-1, by your own run |
# |---|---|
# | What exactly is sharded that was not before? | The optimizer's states: moments, and fp32 masters. The receipt's third line is 1/4; the other two are DDP's. |
# | Why does it save memory? | They are 12 of 16 bytes per parameter, and the update goes element by element: an owner needs nobody else's. 16P bytes became 7P on four ranks. |
# | Why does it cost more? | It does not send more: 6P bytes for both. But the all-gather follows the update, when no backward is left to hide it: DDP issued everything during backward, ZeRO-1 nothing. |
#
# 4P bytes remain on every rank, however many there are. Next: the gradients.

# %% [markdown]
# ## Say it out loud
#
# 1. What does a rank of ZeRO-1 hold, of what, in which precision? What is left with 1000 ranks?
# 2. Why may the optimizer's states be cut anywhere, even within a matrix? When may they not?
# 3. DDP sends about 2P elements per rank and step, and so does ZeRO-1. Why? And why can it be slower
#    all the same?
# 4. What is padding for, who has it, and why does it change neither the update nor the norm?
# 5. Ranks clip by different factors. What did somebody forget, and how would you notice?
# 6. Somebody's ZeRO-1 trains well and saves nothing. What do you measure first?

# %% [markdown]
# ## Summary
#
# - ZeRO-1: 4P + 12P/N in mixed precision, 8P + 8P/N in fp32; never below what is not sharded.
# - One flat space, padded to N·S; rank r owns S elements, wherever tensors end: one stretch, or
#   with buckets a piece of each.
# - reduce_scatter the mean, update your shard, all_gather: an all-reduce with an update inside.
# - As many bytes as DDP, however many micro-batches; but exposed: no computing hides them.
# - Norm: squares add up over shards, one number each; all ranks clip by the same factor.
# - Equal weights prove no sharding: measure bytes, and read the log. A slice keeps its buffer.

# %% [markdown]
# ## Further reading
#
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*
#   (arXiv 1910.02054), sections 5.1 and 7.
# - PyTorch, `torch.distributed.optim.ZeroRedundancyOptimizer`: owners of whole tensors, not of slices.
# - Megatron-LM, *Distributed optimizer*: the same idea, on d ranks. Bytes per parameter: bf16 with
#   fp32 gradients 6 + 12/d; fp16 with fp16 gradients 4 + 16/d.
#
# Next: lesson 06 shards the gradients as they become ready.
