# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 00 · Start here
#
# **ZeRO and FSDP trade communication for memory.** This course teaches you to price the trade.
#
# After this lesson you can
# - run a cell, an exercise and its check, and read what a check tells you;
# - start four real ranks from a notebook and let them add up numbers;
# - read a memory ledger and say whether a job fits.
#
# Time: about 45 minutes. No GPU is needed.

# %% [markdown]
# ## The loop: predict, run, compare
#
# Every lesson does three things. You **predict** bytes with a ledger, which is plain arithmetic. You
# **run** the real thing, on real ranks. You **compare** both in a *receipt*, line by line. A receipt
# that does not balance is a defect: yours to find, or ours to mend.

# %%
import torch
import torch.distributed as dist

from course_lib import explorers, ledger, ranks, specs
from course_lib.checks import check
from course_lib.cli.doctor import examine
from course_lib.measure import receipt, storage_bytes

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# Is everything in place? The doctor looks. Each line is ok, or says what to do.

# %% tags=["nbval-ignore-output"]
examine()

# %% [markdown]
# ## Play first
#
# Here is the whole course in one picture: what a training job keeps in one GPU's memory. Choose a
# model, then raise the number of ranks. Watch which bars shrink, and which do not.

# %% tags=["explorer", "nbval-ignore-output"]
explorers.memory_ledger(model="llama2-7b", ranks=8)

# %% [markdown]
# The bar for `ddp` never shrinks: each rank holds everything, however many ranks there are. That
# redundancy is what ZeRO removes, one part at a time. How, and at what price, fills lessons 04 to 09.

# %% [markdown]
# ## Your first exercise
#
# An exercise is a function with a gap. Write the body, run the cell, then run the check below it.
# The line `raise NotImplementedError` marks the gap; replace it.
#
# Memory is measured in GiB (2^30 bytes) on your screen, and in GB (10^9 bytes) in most papers and on
# GPU boxes. They differ by 7%, enough to turn "fits" into "out of memory".

# %% [markdown]
# ### Exercise 00-gib: Bytes to GiB (1 point)


# %% exercise="00-gib"
def gib(n_bytes):
    """Turn bytes into GiB.

    n_bytes: an int, 0 or more. Returns a float: gib(3 * 2**30) is 3.0.
    """
    ### BEGIN SOLUTION
    return n_bytes / 2**30
    ### END SOLUTION


# %% check="00-gib"
check("00-gib", gib)

# %% [markdown]
# A check calls your function on fixed cases and on fresh ones, so a typed-in answer does not pass.
# Where it fails, it shows the smallest failing case and names the idea that went wrong. Cells after
# an exercise use the course's own version: a gap you leave open stops nothing that follows.

# %%
print(f"80 GB are {ledger.gib(80 * 10**9)}, 80 GiB are {80 * 2**30 / 1e9:.1f} GB")

# %% [markdown]
# ## Ranks
#
# Distributed training is *one program run many times*. Each copy is a **rank**: a process with its
# own memory and a number. The **world size** is how many there are. On a cluster each rank has a GPU;
# here each is a process on your CPU, and the code is the same.
#
# `ranks.run(f, world_size=4)` starts four fresh ranks, calls `f` on each, and returns the four
# results in rank order.


# %%
def hello():
    print(f"hello from rank {dist.get_rank()}")
    return dist.get_rank() * 10


ranks.run(hello, world_size=4)

# %% [markdown]
# What a rank prints is shown with its number; what it returns comes back in the list.

# %% [markdown]
# ### Exercise 00-greet: Four ranks say who they are (1 point)


# %% exercise="00-greet"
def greet():
    """Say who this rank is. Runs on every rank; takes nothing.

    Returns a str: on rank 2 of a world of 4, greet() is "rank 2 of 4".
    """
    ### BEGIN SOLUTION
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    ### END SOLUTION


# %% check="00-greet"
check("00-greet", greet)

# %% [markdown]
# ## One collective
#
# No rank can read another's memory. To share numbers they call a **collective** together, all of
# them, in the same order. `all_reduce` is the best known: every rank gives a tensor, and every rank
# gets the sum of all of them, in place.
#
# Predict: rank 0 gives 0, rank 1 gives 1, rank 2 gives 2, rank 3 gives 3. What does each rank hold
# afterwards?


# %%
def add_up():
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


ranks.run(add_up, world_size=4)

# %% [markdown]
# ### Exercise 00-sum: A sum over all ranks (2 points)
#
# The check gives each rank a tensor that the other ranks never see.


# %% exercise="00-sum"
def global_sum(mine):
    """Add up a tensor over all ranks.

    mine: this rank's float tensor, the same shape on every rank; leave it as it is.
    Returns a tensor of that shape, the same on every rank: with [1.] on one rank and
    [4.] on the other, both return [5.].
    """
    ### BEGIN SOLUTION
    total = mine.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total
    ### END SOLUTION


# %% check="00-sum"
check("00-sum", global_sum)

# %% [markdown]
# ## A check that fails, on purpose
#
# Data parallelism averages gradients over the ranks. The next cell does it wrong. Run it, and read
# the panel: the sentence, the smallest failing case, and the further hint behind the small triangle.


# %% tags=["raises-exception", "nbval-ignore-output"]
def broken_average(grad):
    everyones = grad.clone()
    dist.all_reduce(everyones)
    return everyones


check("00-average", broken_average, seed=0)

# %% [markdown]
# Nothing else has stopped: a failed check raises an error in its own cell only. Now repair it.

# %% [markdown]
# ### Exercise 00-average: Repair a gradient average (2 points)


# %% exercise="00-average"
def average_gradient(grad):
    """Average a gradient over all ranks.

    grad: this rank's gradient, the same shape on every rank; leave it as it is.
    Returns a tensor of that shape: with [1.] and [3.] on two ranks, both return [2.].
    """
    ### BEGIN SOLUTION
    average = grad / dist.get_world_size()
    dist.all_reduce(average)
    return average
    ### END SOLUTION


# %% check="00-average"
check("00-average", average_gradient)

# %% [markdown]
# ## Read a ledger
#
# A ledger lists what stays in a rank's memory for the whole of training: **parameters**,
# **gradients** and **optimizer states**. Together they are the *model states*. Activations and
# buffers come on top, in lesson 02.

# %%
states = ledger.model_states(
    specs.model("llama2-7b"),
    specs.Recipe(precision="zero-fp16", optimizer="adamw"),
    specs.Strategy("ddp", gpus=8),
)
states

# %% [markdown]
# Two bytes for each weight, two for each gradient, and twelve for the optimizer. The weights, of
# which everybody talks, are an eighth of it.
#
# ### Exercise 00-headroom: Read a ledger (2 points)


# %% exercise="00-headroom"
def headroom(ledger, gpu_bytes):
    """How much memory the model states leave free on the GPU.

    ledger: {"parameters": …, "gradients": …, "optimizer_states": …}, ints in bytes.
    gpu_bytes: the GPU's memory in bytes.
    Returns an int in bytes, negative where the states do not fit: with 2, 2 and 12
    on a GPU of 20 it is 4.
    """
    ### BEGIN SOLUTION
    return gpu_bytes - sum(ledger.values())
    ### END SOLUTION


# %% check="00-headroom"
check("00-headroom", headroom)

# %% [markdown]
# ## The receipt
#
# Predict first. A million fp32 parameters take 4 bytes each. Four ranks each hold a full copy, as
# data parallelism does. Then four ranks hold a quarter each, as sharding does.


# %%
def hold(elements):
    return storage_bytes([torch.zeros(elements)])


whole = ranks.run(hold, args=(1_000_000,), world_size=4)
shards = ranks.run(hold, args=(250_000,), world_size=4)

# %%
receipt(
    "a million fp32 parameters on four ranks",
    predicted={"all ranks, replicated": 4 * 4_000_000, "all ranks, sharded": 4_000_000},
    measured={"all ranks, replicated": sum(whole), "all ranks, sharded": sum(shards)},
)

# %% [markdown]
# ## Say it out loud
#
# Close the notebook for a minute and answer, in one or two sentences each:
# 1. What is a rank, and what can it not do without a collective?
# 2. Why does adding GPUs to plain data parallelism not let you train a larger model?
# 3. A GPU is sold as 80 GB. What else do you ask before you say that a job fits?

# %% [markdown]
# ## Summary
#
# - A rank is a process with a number; all ranks run the same code.
# - A collective is called by all ranks, in the same order; all-reduce gives each the sum.
# - Parameters, gradients and optimizer states are the model states; the optimizer's are the largest.
# - GB is 10^9 bytes, GiB 2^30.
# - Predict, run, compare: the receipt balances, or something is wrong.
#
# `course progress` in a terminal shows how far you are; `course reset 00` gives you a fresh copy of
# this lesson and keeps the old one beside it.

# %% [markdown]
# ## Further reading
#
# - PyTorch's documentation of `torch.distributed`: the collectives, each with its arguments.
# - Rajbhandari et al. 2019, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*
#   (arXiv 1910.02054), sections 1 to 3: the problem that this course is about.
#
# Next: lesson 01 computes the ledger by hand.
