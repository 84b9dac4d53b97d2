# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 03 · The communication ledger
#
# After this lesson you can
# - write reduce-scatter and all-gather on send and recv, and say why an all-reduce is both;
# - count the bytes that any of them sends from a rank, padding included;
# - price a collective in seconds from alpha and beta, and say when latency rules;
# - read a data sheet of NVLink, PCIe, InfiniBand or Ethernet, and price a training step on it;
# - tell bus bandwidth from wire speed, and a ring from a hierarchy.
#
# At the end your ledger equals the log of a real DDP and a real FSDP step: difference 0.
#
# Time: 60 to 90 minutes.

# %%
import time

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm, explorers, models, ranks, specs
from course_lib.checks import check
from course_lib.figures.timeline import timeline
from course_lib.measure import receipt
from course_lib.ranks.log import CollectiveLog
from course_lib.sharded import ring
from course_lib.specs import Collective

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# ## Play first
#
# What does it cost to add up a buffer over all ranks? Each curve is a network. Before you touch
# anything, guess: below which size does a faster network hardly help? Then raise the ranks to 1024.
# Which part of the curves moves, and which stays?

# %% tags=["explorer", "nbval-ignore-output"]
explorers.network_price(kind="all_reduce", ranks=8)

# %% [markdown]
# The flat part is latency: it grows with the ranks, and no bandwidth shortens it. The rising part
# is bytes: it hardly depends on the ranks. This lesson takes both apart.
#
# ## Three collectives
#
# A buffer is cut into N chunks, one for each rank.
#
# | collective | a rank gives | a rank gets |
# |---|---|---|
# | reduce_scatter | a whole buffer | one chunk of the sum, its own |
# | all_gather | its chunk | all chunks |
# | all_reduce | a whole buffer | the whole sum |

# %% [markdown]
# Rank r gives 10r, 10r + 1, 10r + 2. Predict what each of three ranks gets from each collective.


# %%
def three():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffer = 10.0 * rank + torch.arange(3.0)
    scattered, gathered, total = torch.empty(1), torch.empty(world_size, 1), buffer.clone()
    dist.reduce_scatter(scattered, list(buffer.split(1)))
    dist.all_gather(list(gathered), buffer[rank : rank + 1])
    dist.all_reduce(total)
    return scattered.tolist(), gathered.flatten().tolist(), total.tolist()


for rank, (scattered, gathered, total) in enumerate(ranks.run(three, world_size=3)):
    print(f"rank {rank}: reduce_scatter {scattered}, all_gather {gathered}, all_reduce {total}")

# %% [markdown]
# ## Count bytes
#
# The ranks stand in a **ring**, and each sends to its right neighbour only. In one step a rank
# sends one chunk and receives one. After N - 1 steps a chunk has been everywhere:
#
# | collective | steps | bytes that a rank sends, of a buffer of S bytes |
# |---|---|---|
# | reduce_scatter | N - 1 | (N-1)/N · S |
# | all_gather | N - 1 | (N-1)/N · S |
# | all_reduce | 2(N - 1) | 2 (N-1)/N · S |
#
# To the byte, a chunk has E/N elements *rounded up*: the last chunks are padded.

# %% [markdown]
# ### Exercise 03-bytes: Bytes per rank (3 points)


# %% exercise="03-bytes"
def bytes_per_rank(kind, elements, itemsize, ranks):
    """Bytes that a ring collective sends from each rank.

    kind: "reduce_scatter", "all_gather" or "all_reduce".
    elements, itemsize: of the whole buffer; bytes of one element. ranks: N, at least 1.
    Returns an int: an all_reduce of 10 fp32 elements on 4 ranks has chunks of 3
    elements and 6 steps, so it sends 6 * 3 * 4 = 72 bytes.
    """
    ### BEGIN SOLUTION
    chunk = -(-elements // ranks)  # rounded up: the last chunks are padded
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (ranks - 1) * chunk * itemsize
    ### END SOLUTION


# %% check="03-bytes"
check("03-bytes", bytes_per_rank)

# %% [markdown]
# Watch the factor as N grows. A thousand ranks send hardly more bytes *each* than eight do.

# %%
for n in (2, 4, 8, 64, 1024):
    reduced = Collective("all_reduce", 10**9, 2, n)
    print(f"N = {n:4}: {reduced.bytes_per_rank / 1e9:.3f} GB sent of {reduced.payload / 1e9} GB")

# %% [markdown]
# ## One step around the ring
#
# `dist.send(tensor, to)` returns when the other side receives. `dist.isend(tensor, to)` returns at
# once, with a request whose `wait()` returns when it is done. Until then leave the tensor alone,
# and keep the request: a send that is dropped may never arrive. `dist.recv(tensor, source)` fills a
# tensor that you made.
#
# All ranks run the same lines. What happens if all of them send before anyone receives?

# %% [markdown]
# ### Exercise 03-exchange: One step around the ring (2 points)


# %% exercise="03-exchange"
def pass_on(tensor):
    """Send to the right, receive from the left. Runs on every rank.

    tensor: this rank's, the same shape on every rank. The right neighbour of rank r is
    r + 1, that of the last rank is 0.
    Returns what the left neighbour sent, a new tensor: with [0.], [10.] and [20.] on three
    ranks, they return [20.], [0.] and [10.].
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    request.wait()
    return received
    ### END SOLUTION


# %% check="03-exchange"
check("03-exchange", pass_on)

# %% [markdown]
# A hang is the usual bug of distributed code. Here it ends as a sentence that names the ranks and
# your line; on a cluster it may end as an idle night. From here on, `ring.exchange(tensor)` is the
# library's version of this step.

# %% [markdown]
# ## Reduce-scatter: partial sums travel
#
# The sum of chunk c has to *end* on rank c. So it *starts* on rank c + 1, and travels right; each
# rank adds its part and passes it on. With three ranks:
#
# | | rank 0 | rank 1 | rank 2 |
# |---|---|---|---|
# | step 1: sends its part of | chunk 2 | chunk 0 | chunk 1 |
# | receives, adds its part of | chunk 1 | chunk 2 | chunk 0 |
# | step 2: sends the sum of | chunk 1 | chunk 2 | chunk 0 |
# | receives, adds its part of | chunk 0 | chunk 1 | chunk 2 |

# %% [markdown]
# The check reads the log, too: N - 1 sends of one chunk, all to the same neighbour.
#
# ### Exercise 03-reduce-scatter: Ring reduce-scatter (4 points)


# %% exercise="03-reduce-scatter"
def reduce_scatter(chunks):
    """Sum over ranks; each rank keeps its own chunk of the sum. Runs on every rank.

    chunks: [N, chunk], this rank's part of every chunk; you may change it.
    Returns [chunk]: the sum over all ranks of their chunks[rank], on rank `rank`.
    With [[1.], [2.]] on rank 0 and [[10.], [20.]] on rank 1: [11.] and [22.].
    One step is ring.exchange(tensor). Row numbers are counted modulo N.
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    sum_so_far = chunks[(rank - 1) % n].clone()
    for step in range(1, n):
        sum_so_far = ring.exchange(sum_so_far)
        sum_so_far += chunks[(rank - 1 - step) % n]
    return sum_so_far
    ### END SOLUTION


# %% check="03-reduce-scatter"
check("03-reduce-scatter", reduce_scatter)

# %% [markdown]
# ## All-gather: chunks travel
#
# The same ring without the adding: in each step a rank passes on what it received in the one
# before, and keeps a copy. In step 1 the chunk of rank - 1 arrives, in step 2 that of rank - 2.
#
# ### Exercise 03-all-gather: Ring all-gather (3 points)


# %% exercise="03-all-gather"
def all_gather(mine):
    """Give every rank the chunks of all ranks. Runs on every rank.

    mine: [chunk], this rank's chunk.
    Returns [N, chunk], the same on every rank: row c is rank c's chunk. With [1.] on
    rank 0 and [2.] on rank 1 both return [[1.], [2.]].
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    table = torch.empty(n, *mine.shape)
    table[rank] = mine
    for step in range(1, n):
        mine = ring.exchange(mine)
        table[(rank - step) % n] = mine
    return table
    ### END SOLUTION


# %% check="03-all-gather"
check("03-all-gather", all_gather)

# %% [markdown]
# ## All-reduce = both
#
# After a reduce-scatter each rank has one finished chunk; an all-gather hands the chunks round.
# Predict the receipt: an all-reduce of 1,000,001 fp32 elements on four ranks.


# %%
def both():
    buffer = torch.arange(1_000_001.0)
    padded = F.pad(buffer, (0, 3)).view(4, -1)  # [4, 250001]
    total = ring.all_gather(ring.reduce_scatter(padded)).flatten()[: len(buffer)]
    dist.all_reduce(buffer)
    return torch.equal(total, buffer)


run = ranks.run(both, world_size=4)
print("the same as dist.all_reduce, rank by rank:", run)

# %%
whole = Collective("all_reduce", 1_000_001, 4, 4)
by_hand = run.log.bytes(rank=0)["send"]
receipt(
    "an all-reduce on four ranks",
    predicted={"sent by rank 0": whole.bytes_per_rank},
    measured={"sent by rank 0": by_hand},
)

# %% [markdown]
# `run.log` holds what every rank issued. Drawn: six sends and six receives on each rank, then
# torch's all_reduce.

# %% tags=["nbval-ignore-output"]
timeline(run.log)

# %% [markdown]
# **This identity is what ZeRO lives on.** Between the two halves each rank holds one summed chunk.
# If it needs no more than that, the second half can wait, or carry something else: updated
# parameters. Stages 1 and 2 (lessons 05 and 06) send the bytes of DDP, no more.
#
# ## Seconds: alpha and beta
#
# A message of n bytes takes **alpha + n · beta** seconds. Alpha is paid for each message, however
# small; beta is 1/bandwidth. A ring pays both in every step:
#
# seconds = steps · (alpha + chunk / bandwidth)
#
# ### Exercise 03-time: The time of a ring (3 points)


# %% exercise="03-time"
def ring_seconds(kind, payload, ranks, alpha_us, gb_s):
    """Seconds that a ring collective takes.

    kind: as before. payload: bytes of the whole buffer, a multiple of `ranks`.
    alpha_us: microseconds for each step. gb_s: bandwidth in 10**9 bytes a second.
    Returns a float: an all_reduce of 4,000,000 bytes on 4 ranks with 10 µs and 50 GB/s
    takes 6 * (10e-6 + 1e6 / 50e9) = 0.00018.
    """
    ### BEGIN SOLUTION
    steps = (2 if kind == "all_reduce" else 1) * (ranks - 1)
    chunk = payload / ranks
    return steps * (alpha_us * 1e-6 + chunk / (gb_s * 1e9))
    ### END SOLUTION


# %% check="03-time"
check("03-time", ring_seconds)

# %% [markdown]
# Below some size, the time is mostly alphas. The buffer at which both cost the same is called n½,
# and it has half of the bandwidth that a large one has.
#
# ### Exercise 03-latency: Where latency and bandwidth cost the same (2 points)


# %% exercise="03-latency"
def n_half(ranks, alpha_us, gb_s):
    """The buffer, in bytes, for which a ring spends as long on alphas as on bytes.

    Arguments as before. Returns a float: with 4 ranks, 10 µs and 50 GB/s it is 2e6.
    """
    ### BEGIN SOLUTION
    chunk = (alpha_us * 1e-6) * (gb_s * 1e9)  # crosses in alpha
    return ranks * chunk
    ### END SOLUTION


# %% check="03-latency"
check("03-latency", n_half)

# %% [markdown]
# A faster network has a *larger* n½: it is harder to feed. Predict: does latency rule the gradient
# of one norm layer (8 KiB)? And a bucket of 25 MiB, on 8 ranks and on 1024?

# %%
print("n½ of an all_reduce     8 ranks      64 ranks    1024 ranks")
for name in ("ib-ndr", "ethernet-100g"):
    sizes = [comm.crossover("all_reduce", n, comm.link_cost(name)) for n in (8, 64, 1024)]
    print(f"{name:18}", *(f"{specs.human(int(size)):>13}" for size in sizes))

# %% [markdown]
# So DDP puts gradients into buckets (lesson 04), and wrapping every tiny module in FSDP is slow
# (lesson 09): crumbs pay alpha, not beta.
#
# ## Four networks
#
# Data sheets speak differently. What counts for a ring is *bytes a second, in one direction*.
#
# | network | the data sheet says | meaning |
# |---|---|---|
# | NVLink 4, one H100 | 900 GB/s | both directions added |
# | PCIe 5 x16 | 126 GB/s | both directions added |
# | InfiniBand NDR, one port | 400 Gbit/s | bits, in each direction |
# | Ethernet, one port | 100 Gbit/s | bits, in each direction |

# %% [markdown]
# Take the bandwidth alone: all gradients at once, no latency, nothing overlapped.
#
# ### Exercise 03-price: One step on four networks (4 points)


# %% exercise="03-price"
def gradient_seconds(parameters, ranks, figure, bits, both_directions):
    """Seconds to all-reduce DDP's bf16 gradients once, in a ring.

    figure: what the data sheet says, in 10**9 units a second. bits: True if the unit is a
    bit, False if a byte. both_directions: True if both directions were added up.
    Returns a float: 10**9 parameters on 2 ranks with 80, True, False (80 Gbit/s are
    10 GB/s) send 2 * 1/2 * 2e9 bytes in 0.2 s.
    """
    ### BEGIN SOLUTION
    bandwidth = figure * 1e9 / (8 if bits else 1) / (2 if both_directions else 1)
    sent = 2 * (ranks - 1) / ranks * (2 * parameters)
    return sent / bandwidth
    ### END SOLUTION


# %% check="03-price"
check("03-price", gradient_seconds)

# %% [markdown]
# Now a whole step of Llama 2 7B under DDP on 64 ranks, from the ledger: bytes alone, and with an
# alpha for each step of each bucket. Each network is taken as if all 64 ranks had one such link
# each.

# %%
plan = comm.step(
    specs.model("llama2-7b"), specs.Recipe("zero-bf16"), specs.Strategy("ddp", gpus=64)
)
plan

# %%
networks = {"nvlink4": comm.gpu_cost("h100-sxm-80")} | {
    name: comm.link_cost(name) for name in ("pcie5-x16", "ib-ndr", "ethernet-100g")
}
for name, network in networks.items():
    bytes_alone = plan.bytes_per_rank * network.beta
    print(f"{name:14} {bytes_alone:6.3f} s, with latency {comm.step_seconds(plan, network):6.3f} s")

# %% [markdown]
# Is that much? Computing takes about 6 FLOP for each parameter and token: with 8192 tokens on a GPU
# that reaches 400 TFLOP/s, 0.8 s. Part of the communication hides behind it, see lesson 04. Over
# Ethernet most of it cannot.
#
# ## Bus bandwidth
#
# Benchmarks measure seconds. Payload over seconds is the *algorithm bandwidth*; it depends on N and
# on the kind. *Bus bandwidth* is what each link would have carried in a ring: bytes sent over
# seconds. It can be laid beside the data sheet.
#
# ### Exercise 03-busbw: Bus bandwidth (3 points)


# %% exercise="03-busbw"
def bus_bandwidth(kind, payload, ranks, seconds):
    """Bus bandwidth in GB/s, from a measured time.

    kind, payload, ranks: as before. seconds: a float, above 0.
    Returns a float: an all_reduce of 8e9 bytes on 8 ranks in 0.04 s has a bus bandwidth
    of 2 * 7/8 * 8e9 / 0.04 / 1e9 = 350.0.
    """
    ### BEGIN SOLUTION
    factor = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    return factor * payload / seconds / 1e9
    ### END SOLUTION


# %% check="03-busbw"
check("03-busbw", bus_bandwidth)

# %% [markdown]
# The *ml-engineering* book reports an all-reduce over eight B200 GPUs: 36 GB/s at 1 MiB, 568 GB/s
# at 128 MiB. Predict both from NVLink 5's 900 GB/s and NCCL's 3.4 µs.

# %%
for mib, reported in ((1, 36), (128, 568)):
    buffer = Collective("all_reduce", mib * 2**20, 1, 8)
    seconds = comm.seconds(buffer, comm.gpu_cost("b200-180"))
    ours = comm.bus_bandwidth(buffer, seconds) / 1e9
    print(f"{mib:3} MiB: alpha and beta give {ours:5.1f} GB/s, reported are {reported}")

# %% [markdown]
# The small one is all latency. For the large one the data sheet is a ceiling: real links reach 75
# to 85% of it. **Yet sources disagree with the ceiling, too:** the same book reports 366 GB/s for a
# ring over eight H200, and 473 with NVLS, over links of 450. NVLS lets the switch add. A GPU then
# sends its buffer about once instead of 1.75 times; the formula still multiplies by 1.75. Bus
# bandwidth is a speed of wires for rings alone.

# %% [markdown]
# ## Two levels
#
# In a ring of 64 GPUs on eight nodes an all-reduce makes 126 steps, one after another. A
# *hierarchical* one does three things, in 7 + 14 + 7 steps:
#
# 1. reduce-scatter within the node, over fast links;
# 2. all-reduce of each shard between nodes, over slow ones;
# 3. all-gather within the node.
#
# Four ranks play two nodes of two. Predict rank 0's log for 16 elements.


# %%
def two_levels():
    rank, buffer = dist.get_rank(), torch.arange(16.0)
    nodes = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    rails = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    shard, node = torch.empty(8), nodes[rank // 2]
    dist.reduce_scatter(shard, list(buffer.split(8)), group=node)
    dist.all_reduce(shard, group=rails[rank % 2])
    dist.all_gather(list(buffer.split(8)), shard, group=node)
    return buffer.tolist() == (4 * torch.arange(16.0)).tolist()


run = ranks.run(two_levels, world_size=4)
print("summed over four ranks:", run)

# %%
predicted = comm.hierarchical(Collective("all_reduce", 16, 4, 4), gpus_per_node=2)
for entry, (where, phase) in zip(run.log[0], predicted, strict=True):
    print(f"{entry.kind:14} among ranks {entry.members}, {entry.sent} bytes sent; ", end="")
    print(f"predicted {phase.kind} {where} nodes, {phase.sent}")

# %% [markdown]
# Does it send less between nodes? It depends on the ring. One ring that leaves a node through *one*
# of its eight ports loads that port with 2(N-1)/N · S; in a hierarchy each port carries its shard's
# part, an eighth. NCCL lays several rings, so that all ports work; then the bytes are about equal,
# and what the hierarchy saves is steps.

# %%
topology = comm.Topology.of(specs.Cluster(gpus=64, gpus_per_node=8, link="ib-ndr"))
for algorithm in ("ring", "hierarchical", "tree"):
    seconds = comm.step_seconds(plan, topology, algorithm)
    print(f"{algorithm:13} {seconds:.3f} s for the gradients of llama2-7b on 8 nodes")

# %% [markdown]
# Here a ring is faster than over InfiniBand in the table above, because steps inside a node pay
# NVLink's alpha, and eight ports share what leaves a node; above, each link carried a whole ring.
#
# A *tree* makes about log N steps in place of N, but carries a whole all-reduce only. Sharded
# training needs the two halves by themselves, and for these NCCL mostly takes rings.
#
# ## Run: a real step
#
# Now the proof: three real steps of `lab-25m` on four ranks, under DDP and under FSDP. DDP
# all-reduces gradients. FSDP gathers each block's parameters before it computes, in forward and
# again in backward, and reduce-scatters its gradients.


# %%
def train(wrap, steps=3):
    torch.manual_seed(0)
    lab = specs.model("lab-25m")
    model = wrap(models.build(lab))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        before = len(ranks.entries())
        tokens = torch.randint(lab.vocab_size, (1, 17))
        logits = model(tokens[:, :-1])  # [1, 16, vocabulary]
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before  # where the last step begins in this rank's log


# %% [markdown]
# In its first two steps DDP also agrees on its buckets, so look at the third. FSDP makes each block
# a unit, and what is left (embedding, last norm, head) the root unit.


# %%
def shard(model):
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def last_step(wrap):
    run = ranks.run(train, world_size=4, args=(wrap,))
    return CollectiveLog(entries[first:] for first, entries in zip(run, run.log, strict=True))


ddp, fsdp = last_step(DistributedDataParallel), last_step(shard)
print("DDP: ", ddp.counts())
print("FSDP:", fsdp.counts())

# %% [markdown]
# ## The receipt
#
# The ledger knows the model, the precision and the strategy, and nothing of the run.

# %%
lab, recipe = specs.model("lab-25m"), specs.Recipe("fp32")
predicted = {name: comm.step(lab, recipe, specs.Strategy(name, gpus=4)) for name in ("ddp", "fsdp")}
predicted["fsdp"]

# %%
receipt("one DDP step, per rank", predicted["ddp"].bytes_by_kind(), ddp.bytes())

# %%
receipt("one FSDP step, per rank", predicted["fsdp"].bytes_by_kind(), fsdp.bytes())

# %% [markdown]
# Difference 0. The counts agree, too: four buckets; 9 + 8 all-gathers and 9 reduce-scatters.
#
# The textbook says that sharding parameters costs 3/2 of DDP's bytes. Here it costs less. Why?
# Which unit is not gathered twice?

# %%
for name, log in (("ddp", ddp), ("fsdp", fsdp)):
    print(f"{name}: predicted {predicted[name].counts()}, logged {log.counts()}")
ratio = sum(fsdp.bytes().values()) / sum(ddp.bytes().values())
print(f"FSDP sends {ratio:.3f} times the bytes of DDP")

# %% [markdown]
# The root unit: backward begins where forward ended, so it is kept. In a model this small it holds
# 30% of the parameters.
#
# Now both steps in time. DDP starts a bucket while another one is on its way: they lie one above
# the other. Which bars of FSDP are forward's, and where does backward begin?

# %% tags=["nbval-ignore-output"]
timeline(ddp)

# %% tags=["nbval-ignore-output"]
timeline(fsdp)

# %% [markdown]
# Forward's are the first nine all_gathers: the root unit's, then one for each block. Backward
# begins before the first reduce_scatter: it gathers a block again to compute its gradients.
#
# ## Measure alpha and beta here
#
# Your machine has a network as well: gloo, over the loopback device. Time all-reduces of many
# sizes, and take the best of ten each.


# %%
def best_times(sizes, repeats=10):
    times = {size: [] for size in sizes}
    for size in sizes:
        buffer = torch.ones(size // 4)
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            times[size].append(time.perf_counter() - start)
    return {size: min(seconds) for size, seconds in times.items()}


sizes = [2**power for power in range(10, 24)]  # 1 KiB to 8 MiB
run = ranks.run(best_times, world_size=4, args=(sizes,))
measured = {size: max(times[size] for times in run) for size in sizes}

# %% [markdown]
# Fit on every other size; predict the rest. The fit minimizes *relative* errors, so that small
# sizes count, too.

# %% tags=["nbval-ignore-output"]
samples = [(Collective("all_reduce", size // 4, 4, 4), measured[size]) for size in sizes]
here = comm.fit(samples[::2])
print(f"alpha {1e6 * here.alpha:.0f} µs a step, bandwidth {here.bandwidth / 1e9:.2f} GB/s\n")
for buffer, seconds in samples[1::2]:
    ours = comm.seconds(buffer, here)
    print(f"{specs.human(buffer.payload, 0):>8}: predicted {1e3 * ours:7.3f} ms, ", end="")
    print(f"measured {1e3 * seconds:7.3f} ms, {ours / seconds - 1:+.0%}")

# %% [markdown]
# Two numbers explain a range of 4096 in size, roughly. Where they miss, something they do not know
# has changed: caches, how gloo cuts its buffers, ranks that share a core.

# %% [markdown]
# ## What the ledger counts, and what moves
#
# The ledger counts what the *algorithm* needs: its logical volume. A backend may move more. The
# operating system counts every byte over the loopback device, so ask it. Predict for a buffer of 4
# MiB on four ranks: 4 · 3/4 · 4 = 12 MiB in all for a reduce_scatter or an all_gather, 24 for an
# all_reduce.


# %%
def loopback_bytes():
    devices = psutil.net_io_counters(pernic=True)
    return devices["lo" if "lo" in devices else "lo0"].bytes_sent


def moved(kind, repeats=5):
    whole, mine = torch.ones(4, 2**18), torch.ones(2**18)  # 4 MiB, 1 MiB
    counted = []
    for _ in range(repeats):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        if kind == "all_reduce":
            dist.all_reduce(whole)
        elif kind == "all_gather":
            dist.all_gather(list(whole), mine)
        else:
            dist.reduce_scatter(mine, list(whole))
        dist.barrier()
        counted.append(loopback_bytes() - before)
    return min(counted)  # what else is sent on this machine can only add


# %% tags=["nbval-ignore-output"]
for kind in ("all_reduce", "all_gather", "reduce_scatter"):
    logical = 4 * Collective(kind, 2**20, 4, 4).bytes_per_rank
    real = ranks.run(moved, world_size=4, args=(kind,))[0]
    print(f"{kind:14} logical {logical / 2**20:5.2f} MiB, moved {real / 2**20:5.2f} MiB")

# %% [markdown]
# All-reduce and all-gather move what they should, and 0.2% of packet headers. Gloo's reduce_scatter
# moves twice that: it all-reduces and throws away the rest, the answer that your check refused.
# NCCL has a real one. So bytes of this course are logical, and *times* measured on gloo say little
# about GPUs.

# %% [markdown]
# ## Say it out loud
#
# 1. Why is an all-reduce a reduce-scatter and an all-gather? What can happen between the two?
# 2. You double the ranks of a ring. What happens to the bytes per rank, and to the latency?
# 3. Somebody says "our network does 900 gigs". What do you ask?
# 4. Your all-reduce reaches 40 GB/s of bus bandwidth on NVLink. Name two causes, and the one number
#    that tells them apart.
# 5. How can measured bus bandwidth exceed the link's speed?
# 6. Price the gradients of a 70B model in bf16 on 512 GPUs with 50 GB/s each.

# %% [markdown]
# ## Summary
#
# - all_reduce = reduce_scatter + all_gather; each half sends (N-1)/N of the buffer.
# - Bytes per rank hardly grow with N; steps, and so latency, do.
# - seconds = steps · (alpha + chunk / bandwidth); below n½ = N · alpha · bandwidth latency rules.
# - Data sheets: bits or bytes? one direction or both? a port or a GPU?
# - Bus bandwidth is bytes of a ring over time; it is wire speed only for a ring.
# - A hierarchy shares slow links out and saves steps.
# - Receipts balance in logical bytes; a backend may move more.

# %% [markdown]
# ## Further reading
#
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*: no
#   algorithm sends less than 2(N-1)/N.
# - Thakur, Rabenseifner and Gropp 2005, *Optimization of Collective Communication Operations in MPICH*:
#   the alpha-beta costs of every algorithm here.
# - NVIDIA nccl-tests, `doc/PERFORMANCE.md`: how bus bandwidth is defined.
# - Bekman, *Machine Learning Engineering*, chapter network: the measured bandwidths quoted above.
#
# Next: lesson 04 builds data parallelism on one all-reduce, and shows where its redundancy lives.
