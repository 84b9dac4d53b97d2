# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 08 · FSDP: the life cycle of a unit
#
# After this lesson you can
# - name a unit's states, sharded, gathering, whole and resharded, and what moves it between them;
# - say which rows are whose, in FSDP2's shards and in FSDP1's flat parameter;
# - explain the root unit, and what `reshard_after_forward` trades;
# - choose three dtypes, of parameters, reduction and output;
# - make a model that fits on no rank, from the meta device.
#
# At the end your units live as those of PyTorch's `fully_shard` do, event by event.
#
# Time: 60 to 90 minutes.

# %%
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from IPython.display import display
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib import comm, explorers, ledger, measure, models, ranks, specs
from course_lib.checks import check
from course_lib.errors import CourseError
from course_lib.figures.timeline import timeline
from course_lib.measure.fully_shard_events import recording_fully_shard
from course_lib.ranks.log import CollectiveLog
from course_lib.sharded import wrapping
from course_lib.sharded.fsdp import FSDP
from course_lib.sharded.fsdp_unit import MixedPrecision

ranks.warm_up()  # loads what the ranks need, in the background

# %% [markdown]
# ## Play first
#
# The small Llama of lesson 07, eight blocks, on four ranks. One step of it is recorded: every
# gather, every free, every reduction, as our FSDP does them, and as PyTorch's does.

# %%
lab = replace(specs.model("lab-25m"), name="lab-5m", vocab_size=1000)
lab = replace(lab, hidden_size=234, head_dim=26, intermediate_size=630)
tokens = torch.randint(lab.vocab_size, (16, 17), generator=torch.Generator().manual_seed(0))
P, MIB = lab.parameters, 2**20


class Lab(nn.Module):
    """A Llama whose forward gives its loss."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.llama = models.build(lab, dtype=dtype)

    def forward(self, tokens):
        return self.llama.loss(tokens)

    @property
    def blocks(self):
        return self.llama.model.layers


# %%
class Job:
    """The model under FSDP, ours or PyTorch's; `step()` trains on this rank's sequences."""

    def __init__(self, pytorch=False, model=None, **options):
        self.model, self.pytorch = Lab() if model is None else model, pytorch
        if pytorch:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh, **options)
        else:
            self.fsdp = FSDP(self.model, self.model.blocks, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(tokens[dist.get_rank() :: dist.get_world_size()])
        loss.backward()
        self.optimizer.step()
        return loss.item()


# %% tags=["nbval-ignore-output"]
def recorded(pytorch):
    """The events of a second step: the first one does not know yet what comes next."""
    job = Job(pytorch)
    job.step()
    record = recording_fully_shard(job.model) if pytorch else job.fsdp.recording()
    with record as events:
        job.step()
    return list(events)


ours, theirs = (ranks.run(recorded, args=(pytorch,)) for pytorch in (False, True))
print(len(ours[0]), "events of ours,", len(theirs[0]), "of PyTorch's, on rank 0")

# %% [markdown]
# Step through one of them. Before you do: how many units are whole at a time? When is the *last*
# block gathered for the second time? Which unit is whole longest?

# %% tags=["explorer", "nbval-ignore-output"]
explorers.life_cycle({"ours": list(ours), "PyTorch's fully_shard": list(theirs)})

# %% [markdown]
# A unit is gathered, computes, is freed; in backward once more; then its gradients leave. Only one
# does otherwise: the first one in the list, the **root**. You will build this now, from the inside:
# a parameter, a unit, all units.
#
# ## A parameter: rows
#
# ZeRO-3 cut each tensor *flat*. FSDP2 cuts it by **rows**, its first dimension D: rank r of N has
# the r-th ⌈D/N⌉ rows. A shard is then a matrix like the parameter, only lower. 18 rows on 8 ranks?
# ⌈18/8⌉ = 3.
#
# ### Exercise 08-rows: The rows of a rank (2 points)


# %% exercise="08-rows"
def rows(dim, ranks, rank):
    """Which rows of a parameter are a rank's.

    dim: int, rows in all. ranks: int. rank: int, from 0. Each rank has ceil(dim / ranks) rows, as
    long as there are any: the last that has some may have fewer, and those after it none.
    Returns (first, stop), as in a slice: row `stop` is not the rank's any more. Neither is beyond
    dim. For 5 rows on 2 ranks: (0, 3) and (3, 5).
    """
    ### BEGIN SOLUTION
    each = -(-dim // ranks)
    return min(rank * each, dim), min((rank + 1) * each, dim)
    ### END SOLUTION


# %% check="08-rows"
check("08-rows", rows)

# %% [markdown]
# Two ranks of eight have nothing, and they still have a parameter, of no rows. Let both libraries
# cut one:


# %%
def shapes(pytorch):
    layer = nn.Linear(4, 18, bias=False)
    if pytorch:
        fully_shard(layer, mesh=init_device_mesh("cpu", (8,)))
        return tuple(layer.weight.to_local().shape)
    FSDP(layer)
    return tuple(layer.weight.shape)


for pytorch in (False, True):
    print(*ranks.run(shapes, world_size=8, args=(pytorch,)))

# %% [markdown]
# `layer.weight` *is* the shard now: an optimizer made after it updates rows, under the name that it
# knows, and a checkpoint finds them there.
#
# What travels is another matter. A collective moves as much from each rank, so shards are padded to
# ⌈D/N⌉ rows before they do: from eight ranks 24 rows come, of which 18 are real. Where does the
# padding stand?
#
# ### Exercise 08-unshard: Whole again (3 points)


# %% exercise="08-unshard"
def unshard(shard, dim):
    """Make a parameter whole. Runs on every rank.

    shard: [rows, ...], this rank's rows alone, which may be none. dim: int, the parameter's rows.
    Returns the whole parameter, [dim, ...], the same on all ranks, by one all_gather of shards that
    are padded to ceil(dim / N) rows. For dim 5 on 4 ranks shards have 2, 2, 1 and 0 rows; 8 come.
    """
    ### BEGIN SOLUTION
    each = -(-dim // dist.get_world_size())
    padded = shard.new_zeros(each, *shard.shape[1:])
    padded[: len(shard)] = shard
    whole = shard.new_empty(dist.get_world_size() * each, *shard.shape[1:])
    dist.all_gather_single(whole, padded)
    return whole[:dim]
    ### END SOLUTION


# %% check="08-unshard"
check("08-unshard", unshard)

# %% [markdown]
# ### FSDP1: one flat parameter
#
# FSDP1 lays all parameters of a unit end to end, pads once, and cuts *that*: a `FlatParameter`. Say
# a unit has a weight [5, 3] and a bias [5]. Who has what?

# %%
unit = {"weight": (5, 3), "bias": (5,)}
flat = [f"{name}[{i}]" for name, shape in unit.items() for i in range(torch.Size(shape).numel())]
flat += ["padding"] * (-len(flat) % 3)
for rank in range(3):
    piece = flat[rank * len(flat) // 3 :][: len(flat) // 3]
    print(f"FSDP1, rank {rank}: {piece[0]} … {piece[-1]}")
for rank in range(3):
    mine = {name: len(torch.empty(shape).chunk(3)[rank]) for name, shape in unit.items()}
    print(f"FSDP2, rank {rank}: rows {mine}")

# %% [markdown]
# | | FSDP1: flat parameter | FSDP2: rows of each |
# |---|---|---|
# | padding | N - 1 elements for a unit | N - 1 rows for a parameter |
# | copies | none: what comes is the unit | out of the buffer, parameter by parameter |
# | a shard | ends within a row | is a matrix of rows |
# | one unit | one dtype, all trained or none | frozen beside trained |
# | optimizer, checkpoint | see one long vector | see the model's tensors |
#
# FSDP1 is simpler for the network, FSDP2 for everybody else. PyTorch recommends FSDP2, and from
# here on it is what we mean.

# %% [markdown]
# ## Units, and the root
#
# You choose modules. What you do not choose? Embedding, last norm and head must be sharded and
# gathered, too. They are the **root unit**'s: the model itself, which has what is left.
#
# A unit may be within a unit. And two units may share a weight: each would gather, free and update
# its own copy. FSDP should refuse that, aloud.
#
# ### Exercise 08-units: Whose parameter is it? (3 points)


# %% exercise="08-units"
def assign(model, chosen):
    """Cut a model into units.

    model: an nn.Module. chosen: a list of modules of it, which are units besides the model itself.
    Returns {unit: its parameters}, where unit is the model or a chosen module, and parameters are a
    list or a set, each once. A parameter is the innermost unit's that has it. Raises ValueError
    where two units share a parameter. For embed, two blocks and a head, the first block chosen:
    {model: [embed's, the second block's, head's], block: [its own]}.
    """
    ### BEGIN SOLUTION
    units, owner = {model: set()}, {}

    def visit(module, unit):
        unit = module if module in chosen else unit
        for p in module.parameters(recurse=False):
            if owner.setdefault(p, unit) is not unit:
                raise ValueError("two units share a parameter")
            units.setdefault(unit, set()).add(p)
        for child in module.children():
            visit(child, unit)

    visit(model, model)
    return units
    ### END SOLUTION


# %% check="08-units"
check("08-units", assign)

# %% [markdown]
# Our Llama has nine units. Tie a block's weight to the head, and the library refuses it:

# %%
model = Lab()
for module, parameters in wrapping.assign(model, model.blocks).items():
    print(f"{type(module).__name__:6}{sum(p.numel() for p in parameters):>9,} parameters")
model.llama.lm_head.weight = model.llama.model.embed_tokens.weight  # both are the root's
wrapping.assign(model, model.blocks)
model.blocks[0].mlp.up_proj.weight = model.blocks[1].mlp.up_proj.weight
try:
    wrapping.assign(model, model.blocks)
except CourseError as error:
    print(error)

# %% [markdown]
# ## The life cycle
#
# ```
#   sharded ──gather──> gathering ──wait──> whole ──reshard──> sharded
# ```
#
# Between gather and wait the network works, and the rank may compute something else. (Lesson 09 is
# about that; yours will wait at once.) Four moments in a step move a unit:
#
# | moment | when |
# |---|---|
# | `pre_forward` | before the unit's forward |
# | `post_forward` | after it |
# | `pre_backward` | the gradient of the unit's output is there |
# | `post_backward` | the gradients of all its parameters are complete |
#
# The skeleton calls four functions then. First, how rows are laid out to travel, a line for each
# rank:


# %%
def lines_of(tensor):
    """[D, …] as [N, ⌈D/N⌉ · …]: a line for each rank's rows, padded with zeros."""
    size = -(-len(tensor) // dist.get_world_size()) * tensor[0].numel()
    lines = tensor.new_zeros(dist.get_world_size(), size)
    lines.view(-1)[: tensor.numel()] = tensor.detach().flatten()
    return lines


def five_rows():
    return lines_of(torch.arange(1.0, 6.0)).tolist()


ranks.run(five_rows, world_size=4)[0]

# %% [markdown]
# A unit has a shard [S], this rank's line of all its parameters, end to end: so one all_gather
# moves them all. `show` sorts out what came.


# %%
class Unit:
    """One rank's part of a unit: its rows in `shard` [S], and parameters to be made whole."""

    def __init__(self, module, parameters, root):
        self.module, self.root, self.state = module, root, "whole"
        self.parameters = list(parameters)
        self.sizes = [-(-len(p) // dist.get_world_size()) * p[0].numel() for p in self.parameters]
        mine = [lines_of(p)[dist.get_rank()] for p in self.parameters]
        self.shard = torch.cat(mine)  # what the optimizer updates
        self.free()

    def free(self):
        for p in self.parameters:
            p.untyped_storage().resize_(0)
        self.state = "sharded"

    def show(self, whole):
        """whole: [N·S], all ranks' shards, one after another."""
        lines = whole.view(dist.get_world_size(), -1).split(self.sizes, dim=1)
        for p, columns in zip(self.parameters, lines, strict=True):
            p.untyped_storage().resize_(p.nbytes)
            p.data.view(-1).copy_(columns.flatten()[: p.numel()])
        self.state = "whole"


# %% [markdown]
# Gradients go the other way: whole ones are laid out in lines, and what comes back is added up.


# %%
class Unit(Unit):  # the same class, continued
    def gradient(self):
        """This rank's whole gradient, [N·S]; the parameters' own go."""
        lines = torch.cat([lines_of(p.grad) for p in self.parameters], dim=1)
        for p in self.parameters:
            p.grad = None
        return lines.flatten()

    def add(self, gradient):
        """gradient: [S]. It is added to the shard's."""
        before = 0 if self.shard.grad is None else self.shard.grad
        self.shard.grad = before + gradient


# %% [markdown]
# The skeleton: hooks call a unit's four functions. `pre_backward` is a hook on the output itself,
# as in FSDP2; `post_backward` comes with the last of the unit's gradients.


# %%
def attach(unit, hooks):
    """hooks: {"pre_forward": f, "post_forward": f, "pre_backward": f, "post_backward": f}."""
    arrived = []

    def before(*_):
        hooks["pre_forward"]()

    def after(module, inputs, output):
        hooks["post_forward"]()
        output.register_hook(lambda _: hooks["pre_backward"]())

    def on_gradient(p):
        arrived.append(p)
        if len(arrived) == len(unit.parameters):
            arrived.clear()
            hooks["post_backward"]()

    unit.module.register_forward_pre_hook(before)
    unit.module.register_forward_hook(after)
    for p in unit.parameters:
        p.register_post_accumulate_grad_hook(on_gradient)


# %% [markdown]
# A first life cycle, that trains right and shards nothing but the optimizer: gather before
# forward, keep it, all_reduce gradients.


# %%
def kept_whole(unit):
    def gather():
        pieces = [torch.empty_like(unit.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, unit.shard)
        unit.show(torch.cat(pieces))

    def all_reduce():
        whole = unit.gradient()
        dist.all_reduce(whole)
        mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
        unit.add(mine / dist.get_world_size())

    def nothing():
        pass

    return dict(
        pre_forward=gather, post_forward=nothing, pre_backward=nothing, post_backward=all_reduce
    )


# %%
def live(life_cycle, steps=3):
    """Losses, the last step's log, MiB of whole parameters after forward and after backward."""
    model, losses, held = Lab(), [], []
    owned = wrapping.assign(model, model.blocks).items()
    units = [Unit(module, parameters, module is model) for module, parameters in owned]
    for unit in units:
        attach(unit, life_cycle(unit))
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=1e-3, foreach=False)
    for _ in range(steps):
        start = len(ranks.entries())
        loss = model(tokens[dist.get_rank() :: dist.get_world_size()])
        held = [measure.storage_bytes(model.parameters()) / MIB]
        loss.backward()
        held += [measure.storage_bytes(model.parameters()) / MIB]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    log = Counter(entry.kind for entry in ranks.entries()[start:])
    return f"losses {losses}, {dict(log)}, whole: {held[0]:.1f}, then {held[1]:.1f} MiB"


print(ranks.run(live, args=(kept_whole,))[0])

# %% [markdown]
# It runs. 9 gathers, 9 all_reduces, and 20 MiB that never go: ZeRO-1's memory, at most. Now make it
# FSDP: what should be whole, and when?
#
# ### Exercise 08-cycle: The life cycle of a unit (5 points)


# %% exercise="08-cycle"
def life_cycle(unit):
    """What a unit does in a step. Runs on every rank, once for each unit, which is sharded.

    unit: has root (is it the root unit?), state ("sharded" or "whole"), shard [S], show(whole
    [N·S]), free(), gradient() -> [N·S], add([S]).
    Returns {"pre_forward": f, "post_forward": f, "pre_backward": f, "post_backward": f}, functions
    without arguments. A unit is whole while it computes, and at no other time; but the root stays
    whole from forward to backward, and is gathered once. Gradients: the mean over ranks, by a
    reduce_scatter. For shards [1., 2.] and [3., 4.], whole is [1., 2., 3., 4.].
    """

    ### BEGIN SOLUTION
    def unshard():
        if unit.state == "sharded":
            whole = unit.shard.new_empty(dist.get_world_size() * len(unit.shard))
            dist.all_gather_single(whole, unit.shard)
            unit.show(whole)

    def reshard():
        if not unit.root:
            unit.free()

    def reduce():
        unit.free()
        mean = torch.empty_like(unit.shard)
        dist.reduce_scatter_single(mean, unit.gradient() / dist.get_world_size())
        unit.add(mean)

    return dict(
        pre_forward=unshard, post_forward=reshard, pre_backward=unshard, post_backward=reduce
    )
    ### END SOLUTION


# %% check="08-cycle"
check("08-cycle", life_cycle)

# %% [markdown]
# Put `life_cycle` in place of `kept_whole` below, and run it on the Llama. Expect the same losses,
# 17 all_gathers, 9 reduce_scatters, and 1.8 MiB, then 0.0.

# %%
print(ranks.run(live, args=(kept_whole,))[0])

# %% [markdown]
# That is FSDP. `course_lib.sharded.fsdp` adds what a real model needs: gathers under way while
# another unit computes, parameters that get no gradient, frozen ones, units that are called twice,
# accumulation. Read it: `fsdp_parameter`, `fsdp_unit`, then `fsdp`.
#
# A parameter there has two faces: `model.parameters()` shows shards between steps, and whole ones
# while the unit computes.

# %% [markdown]
# ## Free after forward, or not
#
# Freed after forward, gathered again in backward: that second gather is a third of the traffic.
# `reshard_after_forward=False` keeps what forward gathered. And the root? It is never freed after
# forward, whatever you say: backward begins with the head at once.
#
# ### Exercise 08-reshard: Free after forward, or not (3 points)


# %% exercise="08-reshard"
def micro_batch(blocks, root, reshard):
    """What a micro-batch costs, on each rank.

    blocks: list of ints, bytes of each block when it is whole; each is a unit. root: int, bytes of
    the root unit's own. reshard: bool, reshard_after_forward.
    Returns {"all_gathers": how many, "reduce_scatters": how many, "whole": bytes of whole
    parameters when forward ends}. For one block of 40 and a root of 100, resharded: 3, 2 and 100.
    """
    ### BEGIN SOLUTION
    again = len(blocks) if reshard else 0
    return {
        "all_gathers": 1 + len(blocks) + again,
        "reduce_scatters": 1 + len(blocks),
        "whole": root if reshard else root + sum(blocks),
    }
    ### END SOLUTION


# %% check="08-reshard"
check("08-reshard", micro_batch)

# %% [markdown]
# There is a third way: a *number* n of ranks. After forward each keeps 1/n, not 1/N, and gathers
# for backward among n neighbours, which should have a fast link: the ranks of a node, say. The unit
# is **resharded**. Predict all three, on four ranks:


# %%
def trade(reshard):
    """One step's log, and what is held beyond shards when forward ends."""
    job = Job(reshard_after_forward=reshard)
    job.step()
    start = len(ranks.entries())
    loss = job.model(tokens[dist.get_rank() :: dist.get_world_size()])
    held = sum(unit.held for unit in job.fsdp.units)
    loss.backward()
    return {"log": (start, len(ranks.entries())), "held": held}


def log_of(run):
    """Of each rank, the part of the log that its result names."""
    return CollectiveLog(log[slice(*found["log"])] for log, found in zip(run.log, run, strict=True))


trades = {reshard: ranks.run(trade, args=(reshard,)) for reshard in (True, 2, False)}
for reshard, run in trades.items():
    sent, held = log_of(run).bytes()["all_gather"] / MIB, run[0]["held"] / MIB
    gathers = sum(entry.kind == "all_gather" for entry in log_of(run)[0])
    print(f"{reshard!s:5}: {gathers:2} gathers, {sent:4.1f} MiB; held after forward: {held:4.1f}")

# %% [markdown]
# Memory for traffic. With True, 1.8 MiB, the root alone; with 2, half of each block, and gathers
# that move 1/2 of a block, not 3/4; with False all 20 MiB, and about half the gathers. `False` is
# ZeRO-2's memory at the end of forward: use it where parameters are small beside activations.

# %% [markdown]
# ## Three dtypes
#
# Shards, their gradients and the optimizer stay in fp32. Beside these there are three choices:
#
# - **param**: what is gathered and computed with. bf16 halves the all_gathers.
# - **reduce**: in which gradients are summed over ranks.
# - **output**: in which the model returns, fp32 for a loss.
#
# bf16 has 8 bits of mantissa. How much does a sum over ranks lose? Each of them rounds it again.

# %% tags=["nbval-ignore-output"]
gradients = torch.randn(256, 10_000, generator=torch.Generator().manual_seed(1)).bfloat16()
for count in (8, 64, 256):
    exact = gradients[:count].double().mean(0)
    total = torch.zeros(10_000, dtype=torch.bfloat16)
    for gradient in gradients[:count]:  # as they go round the ring
        total += gradient
    off = (total.double() / count - exact).norm() / exact.norm()
    fp32 = (gradients[:count].float().mean(0).double() - exact).norm() / exact.norm()
    print(f"{count:3} ranks: bf16 is off by {off:.2%}, fp32 by {fp32:.1e}")

# %% [markdown]
# The more ranks, the worse. And when to divide? In fp32 it makes no difference. In fp16 it does:
# numbers end at 65,504, and a sum before the division may be beyond; divided first, small gradients
# vanish. PyTorch divides by about √N before, and by the rest after. bf16 has the range of fp32, and
# loses digits instead.
#
# ### Exercise 08-reduce: Compute in bf16, reduce in fp32 (3 points)


# %% exercise="08-reduce"
def mean_of_rows(gradient):
    """Reduce a unit's gradient. Runs on every rank.

    gradient: [N·S] in bf16, this rank's whole gradient, a line of S elements for each rank.
    Returns [S] in fp32: this rank's line of the mean over ranks, made in fp32 throughout, by one
    reduce_scatter. On 2 ranks, [1., 2.] and [3., 3.] give [2.] on rank 0 and [2.5] on rank 1.
    """
    ### BEGIN SOLUTION
    whole = gradient.float() / dist.get_world_size()
    mean = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_single(mean, whole)
    return mean
    ### END SOLUTION


# %% check="08-reduce"
check("08-reduce", mean_of_rows)

# %% [markdown]
# What does it cost? Predict the bytes of both kinds, relative to fp32.


# %%
def in_dtypes(param, reduce):
    job = Job(precision=MixedPrecision(param=param, reduce=reduce, output=torch.float32))
    start = len(ranks.entries())
    job.step()
    return {
        "log": (start, len(ranks.entries())),
        "shard": str(job.model.blocks[0].mlp.up_proj.weight.dtype),
    }


bf16, fp32 = torch.bfloat16, torch.float32
for param, reduce in ((fp32, fp32), (bf16, fp32), (bf16, bf16)):
    run = ranks.run(in_dtypes, args=(param, reduce))
    moved = {kind: f"{n / MIB:.1f} MiB" for kind, n in log_of(run).bytes().items()}
    print(f"param {param}, reduce {reduce}: {moved}, shards {run[0]['shard']}")

# %% [markdown]
# Gathers halve, reductions stay: 2P in place of 3P, in bytes of fp32. That is the usual choice; the
# last row saves a sixth more, and pays in digits.
#
# ## A model that fits on no rank
#
# FSDP cuts a model that is there. A model of 140 GB is nowhere. On the **meta device** a parameter
# is a shape without memory:

# %%
with torch.device("meta"):
    layer = nn.Linear(100_000, 100_000)
print(layer.weight.shape, layer.weight.device, "40 GB, of which none are there")

# %% [markdown]
# So make the model on meta, and give it memory unit by unit. `module.to_empty(device=…)` moves a
# module's shapes to a device, to "cpu" or back to "meta", without any numbers; each of its modules
# that has parameters can fill them by `reset_parameters()`. Then cut, and let go. All ranks draw
# the same random numbers. `torch.chunk` cuts as FSDP2 does, but for empty shards:


# %%
def rows_of(tensor, rank, ranks):
    """The rank's rows of a tensor [D, …], a copy."""
    chunks = tensor.detach().chunk(ranks)
    return chunks[rank].clone() if rank < len(chunks) else tensor.detach()[:0].clone()


[len(rows_of(torch.empty(18, 4), rank, 8)) for rank in range(8)]

# %% [markdown]
# ### Exercise 08-meta: Make it unit by unit (4 points)


# %% exercise="08-meta"
def make(units, rank, ranks):
    """Make a rank's shards of a model that is on the meta device. No communication.

    units: list of nn.Modules, all of whose modules with parameters have a reset_parameters().
    rank, ranks: ints. Returns a list with {name: rows} for each unit: names as in
    unit.named_parameters(), rows [rows, ...] of their own memory. At no time is more than one unit
    whole, and none when it returns. For nn.Linear(3, 5) on rank 1 of 2: [{"weight": [2, 3],
    "bias": [2]}], in shapes.
    """
    ### BEGIN SOLUTION
    shards = []
    for unit in units:
        unit.to_empty(device="cpu")
        for module in unit.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        shards.append({name: rows_of(p, rank, ranks) for name, p in unit.named_parameters()})
        unit.to_empty(device="meta")
    return shards
    ### END SOLUTION


# %% check="08-meta"
check("08-meta", make)

# %% [markdown]
# Our FSDP does this for a model that it finds on meta, and asks `init` to fill each module.
# (PyTorch shards on meta, gives memory to shards alone, and fills those: its random numbers know
# their rows.) How much is there at most?


# %% tags=["nbval-ignore-output"]
def from_meta():
    most = 0

    def fill(module):
        nonlocal most
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)
        there = [p for p in model.parameters() if not p.is_meta]
        most = max(most, measure.storage_bytes(there))

    with torch.device("meta"):
        model = Lab()
    job = Job(model=model, init=fill)
    return most / MIB, [round(job.step(), 4) for _ in range(3)]


most, losses = ranks.run(from_meta)[0]
print(f"whole: {4 * P / MIB:.1f} MiB; a quarter: {P / MIB:.1f}; at most there: {most:.1f}")
print("and it trains:", losses)

# %% [markdown]
# ## Run: the same as `fully_shard`
#
# Twenty steps, four ranks, gradients clipped at a norm of 1: a norm over all shards of all ranks.


# %%
def train(pytorch, steps=20):
    """Losses, norms, and where the last step lies in the log."""
    job, losses, norms = Job(pytorch), [], []
    for _ in range(steps):
        start = len(ranks.entries())
        job.optimizer.zero_grad()
        loss = job.model(tokens[dist.get_rank() :: dist.get_world_size()])
        loss.backward()
        end = len(ranks.entries())
        if pytorch:
            norm = nn.utils.clip_grad_norm_(job.model.parameters(), 1.0).full_tensor().item()
        else:
            norm = job.fsdp.clip_grad_norm_(1.0)
        job.optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    found = {"losses": losses, "norms": norms, "log": (start, end)}
    return (
        found if pytorch else found | {"held": measure.model_state_bytes(job.model, job.optimizer)}
    )


# %% tags=["nbval-ignore-output"]
mine, pytorchs = (ranks.run(train, args=(p,), timeout=300) for p in (False, True))
for what in ("losses", "norms"):
    a, b = (torch.tensor([found[what] for found in run]).mean(0) for run in (mine, pytorchs))
    shown = ", ".join(f"{x:.4f}" for x in a[::4])
    print(f"{what}: {shown}, …; furthest from fully_shard's: {(a - b).abs().max():.1e}")
a, b = ([(entry.kind, entry.payload) for entry in log_of(run)[0]] for run in (mine, pytorchs))
print(
    f"{len(a)} collectives, and {len(b)}: {'the same' if a == b else 'not the same'} in kind, "
    "order and bytes"
)

# %% [markdown]
# ## The receipts
#
# The ledger knows model, recipe and strategy, and nothing of the run. After a step, before
# zero_grad:

# %%
recipe, strategy = specs.Recipe("fp32"), specs.Strategy("fsdp", gpus=4)
states = ledger.model_states(lab, recipe, strategy)
display(measure.receipt("at rest, each rank", states.by_category(), mine[0]["held"]))
plan, log = comm.step(lab, recipe, strategy), log_of(mine)
print(plan.counts(), "expected,", log.counts(), "in the log")
measure.receipt("one step, sent by each rank", plan.bytes_by_kind(), dict(log.bytes()))

# %% [markdown]
# Difference 0: 16P/4, with padding in rows.
#
# Now the log, drawn. In which order do a block's re-gather and the reduction of the block above it
# come?

# %% tags=["nbval-ignore-output"]
timeline(log)

# %% [markdown]
# The re-gather first: as backward comes to a block, the one below it is sent for, and travels while
# this one computes. Then this one's gradients leave, while the next one computes. The last two
# reductions are the lowest block's and the root's.

# %% [markdown]
# ## The three questions
#
# | question | FSDP, by your own run |
# |---|---|
# | What exactly is sharded that was not before? | Nothing that ZeRO-3 did not shard: 16P/N. But each parameter by its rows, so that the model's own tensors are the shards. |
# | Why does it save memory? | A unit is whole only from its gather to its reshard: the root, a block, and one that is on its way. |
# | Why does it cost more? | What was freed comes again: 17 gathers for 9 units. `reshard_after_forward=False` takes that back, for all of the memory. |

# %% [markdown]
# ## Say it out loud
#
# 1. Walk through a block's states in one step. Where does the root differ, and why?
# 2. A weight of 18 rows on 8 ranks: who has what, and how many rows travel?
# 3. What does FSDP1's flat parameter spare, and what does it cost the optimizer?
# 4. `reshard_after_forward=8` on 64 ranks, 8 to a node: what is held, what goes between nodes?
# 5. You compute in bf16. Where is fp32 left, and what would you lose without it?
# 6. Two blocks share a weight. What would go wrong if FSDP said nothing?
# 7. Why not `Lab().to("cpu")` on every rank, and then shard?

# %% [markdown]
# ## Summary
#
# - A unit is sharded, gathering, whole, and sharded again; twice in each micro-batch.
# - FSDP2 cuts rows: ⌈D/N⌉ each, the last ranks may have none. Padding only travels.
# - FSDP1 cuts one flat parameter per unit: less padding, no tensors to recognise.
# - The root has what no unit has; it stays whole from forward to backward.
# - `reshard_after_forward`: True 3P and little memory; False 2P and all of it; n between.
# - Gather in bf16, reduce in fp32, keep fp32 shards: 2P in bytes.
# - On meta a model costs nothing: make, cut and let go unit by unit.

# %% [markdown]
# ## Further reading
#
# - Zhao et al. 2023, *PyTorch FSDP* (arXiv 2304.11277): FSDP1, section 3 and 4; its flat parameter.
# - PyTorch's documentation, `torch.distributed.fsdp.fully_shard`: its arguments are those above.
# - PyTorch's tutorial *Getting started with FSDP2*; torchtitan's `docs/fsdp.md`, from FSDP1 to 2.
#
# Next: lesson 09 tunes this: units, prefetch, checkpointing, offload, hybrid sharding.
