# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 02 · Activations and the peak
#
# After this lesson you can
#
# - add to the ledger what lesson 01 left out: activations, logits, and what comes and goes;
# - say *when* in a step most is there, and what would move it;
# - say what activation checkpointing keeps, what it computes again, and what that costs;
# - tell allocated from reserved;
# - answer "why did FSDP not save memory?"
#
# At the end you predict the peak of a real step, by category, and measure it: difference 0.
#
# Time: 60 to 90 minutes.

# %%
import os
import subprocess
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import HTML
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from course_lib import explorers, ledger, measure, models, ranks, specs
from course_lib.checks import check
from course_lib.figures.live_bytes import live_bytes
from course_lib.ledger.work import work
from course_lib.sharded.fsdp import FSDP

ranks.warm_up()  # loads what the ranks need, in the background
torch.set_num_threads(1)  # small tensors are faster so
MIB = 2**20

# %% [markdown]
# ## Play first
#
# One step of Llama 3 8B on 8 GPUs, from left to right. Before you touch anything: where do you
# expect the peak, in forward, at the loss, in backward, or in the optimizer's step? Then try. What
# moves it elsewhere? Twice the sequence: which part doubles? More GPUs: which part does not shrink?

# %% tags=["explorer", "nbval-ignore-output"]
explorers.step_memory("llama3-8b", strategy="fsdp", gpus=8)

# %% [markdown]
# ## Step 1: what forward leaves to backward
#
# For y = xW the gradient of W is xᵀ times that of y: backward needs x, so forward *saves* it. What
# is saved for backward is what we call **activations**. Which operators save what? Ask autograd:


# %%
def saved_by(operator, *inputs):
    """The shapes of what an operator saves."""
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None):
        operator(*inputs)
    return shapes


# %%
x, wide, weight = (torch.randn(*s, requires_grad=True) for s in ((5, 8), (5, 8), (32, 8)))
print("linear :", saved_by(F.linear, x, weight), "input, and the weight")
print("sum    :", saved_by(torch.add, x, wide))
print("product:", saved_by(torch.mul, x, wide), "both")
print("GELU   :", saved_by(F.gelu, x), "input")
print("softmax:", saved_by(lambda x: x.softmax(-1), x), "output")

# %% [markdown]
# A layer of GPT, with s tokens in a sequence, b sequences, hidden size h and a heads. Sums save
# nothing; each norm saves its input. In elements:
#
# | operator | saves | tensors of s·b·h | of a·s²·b |
# |---|---|---|---|
# | two norms | inputs | 2 | |
# | q, k, v: one linear layer | input | 1 | |
# | attention | q, k, v | 3 | |
# | softmax, and dropout on it | output; output | | 2, and a mask |
# | output, and dropout | input | 1, and a mask | |
# | MLP: h → 4h, GELU, 4h → h, and dropout | three inputs | 1 + 4 + 4, and a mask | |
#
# A mask has one byte for each element.

# %% [markdown]
# **Flash attention** is one kernel. It never has all scores at once, and computes them again in
# backward: nothing of size a·s²·b is saved. Its output is the input of the next operator, which is
# in the table already. (It also keeps one fp32 number for each query of a head; leave that out.)
#
# ### Exercise 02-saved: What a layer saves (3 points)


# %% exercise="02-saved"
def saved(s, b, h, a, itemsize, flash):
    """Bytes that one layer of GPT saves for backward.

    s, b, h, a: ints, as above. itemsize: bytes of an element, 2 or 4; of a mask's always 1.
    flash: True if attention is one kernel, so that nothing of size a·s²·b is saved.
    Returns an int. For s=4, b=1, h=8, a=2, itemsize=2, flash=False: 1248; with flash 1088.
    """
    ### BEGIN SOLUTION
    sbh, scores = s * b * h, a * s * s * b
    rest = 16 * itemsize * sbh + 2 * sbh  # two masks
    return rest if flash else rest + 2 * itemsize * scores + scores
    ### END SOLUTION


# %% check="02-saved"
check("02-saved", saved)

# %% [markdown]
# In 16 bits this is **sbh(34 + 5as/h)**, the formula of Korthikanti et al. The ledger of this
# course has no such formula: it runs a model's operators on tensors that have a size and nothing
# else, and lets each save what it saves. What comes out for GPT-2 XL, without dropout's and norms'
# small print?


# %%
def left_by_a_block(model, recipe, block, execution=ledger.CUDA):
    """Bytes that are there after a block's forward, and were not before."""
    events = work(model, recipe, execution, {block})
    now = {event.kind: event.now for event in events if event.name == block}
    return now["leave"] - now["enter"]


# %%
s, b, h, a = 1024, 2, 1600, 25
recipe = specs.Recipe("zero-fp16", micro_batch=b, seq_len=s)
for attention, formula in (("explicit", s * b * (34 * h + 5 * a * s)), ("flash", s * b * 34 * h)):
    kernels = ledger.Execution(attention=attention, dropout=True)
    bytes_ = left_by_a_block(specs.model("gpt2-xl"), recipe, "transformer.h.1", kernels)
    print(f"{attention:8} {bytes_:,} bytes; the formula's {formula:,}; {bytes_ - formula:,} more")

# %% [markdown]
# The rest is fp32 statistics: two for each token in each of two norms (32,768 bytes), and flash
# attention's one for each query of a head (204,800).
#
# GPT-3 has h = 12,288, a = 96, s = 2,048: 5as/h is 80, against 34. Scores were 70% of all
# activations. That is what flash attention and selective checkpointing got rid of.
#
# Formulas are of *kernels*, not of models: a norm that is composed of several operators saves more,
# and people who used the 34 bytes on such a model measured more than 50.
#
# ## Step 2: a Llama block
#
# RMSNorm, grouped k and v, flash attention, SwiGLU, no dropout. This time you get operators, and
# find the tensors.

# %% [markdown]
# | operator | saves |
# |---|---|
# | norm | its input |
# | q_proj, k_proj, v_proj | their input |
# | rotation of q and k | nothing (but two small tables) |
# | attention, one kernel | the q, k, v that it is given, and its output |
# | o_proj | its input |
# | sum | nothing |
# | norm | its input |
# | gate_proj, up_proj | their input |
# | silu(gate) | its input |
# | silu(gate) · up | both |
# | down_proj | its input |
# | sum | nothing |
#
# A tensor that two operators save is there once.
#
# ### Exercise 02-block: What a Llama block saves (4 points)


# %% exercise="02-block"
def block_saves(config, tokens, itemsize):
    """Bytes that a Llama block saves for backward, fp32 statistics and rotary tables left out.

    config: a dict with hidden_size, intermediate_size, num_attention_heads and
    num_key_value_heads. tokens: int, of all sequences. itemsize: bytes of an element.
    Returns {"attention": bytes, "mlp": bytes}, each with the norm before it. For sizes 8, 20, 4 and
    2, 10 tokens and 2 bytes: 800 and 1920.
    """
    ### BEGIN SOLUTION
    h, i = config["hidden_size"], config["intermediate_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = h + h + (h + kv + kv + h)  # input, normalized; q, k, v and the output
    mlp = h + h + (i + i + i + i)  # input, normalized; gate, silu(gate), up, product
    return {"attention": attention * tokens * itemsize, "mlp": mlp * tokens * itemsize}
    ### END SOLUTION


# %% check="02-block"
check("02-block", block_saves)

# %% [markdown]
# By hand and by the ledger, for Llama 3 8B on one sequence of 8,192 tokens:

# %%
llama, T = specs.model("llama3-8b"), 8192
h, i, kv = llama.hidden_size, llama.intermediate_size, llama.num_kv_heads * llama.head_dim
recipe = specs.Recipe("fsdp-bf16", seq_len=T)
by_hand = {
    "attention and MLP": 2 * T * (6 * h + 2 * kv + 4 * i),
    "statistics": 4 * T * (2 + llama.num_heads),
    "cos and sin": 2 * (2 * 2 * T * llama.head_dim // 2),
}
bytes_ = left_by_a_block(llama, recipe, "model.layers.1")
print(f"by hand {sum(by_hand.values()):,}, by the ledger {bytes_:,}")
inner = 8 * T * i / bytes_
print(f"{bytes_ / (2 * T * h):.1f} tensors of the hidden size; of inner width: {inner:.0%}")


# %% [markdown]
# Over 32 blocks 41 GiB. Most of it is the MLP's: four tensors of 3.5 h each. A fused SwiGLU need
# not save silu(gate), and so on: kernels decide.

# %% [markdown]
# ## Step 3: the logits
#
# The head gives each token one number for each word: 128,256 of them in Llama 3, 31 times its
# hidden size. A bf16 model, with its loss in fp32, as PyTorch goes about it:
#
# | step | makes, bytes a logit | then lets go |
# |---|---|---|
# | head | logits, 2 | |
# | cast | fp32 copy, 4 | the logits |
# | log_softmax, saved | 4 | |
# | end of forward | | the fp32 copy, unless a variable has it |
# | backward of picking the targets' | gradient of log_softmax, 4 | |
# | backward of log_softmax | gradient of the copy, 4 | log_softmax, its gradient |
# | backward of the cast | gradient of the logits, 2 | gradient of the copy |

# %% [markdown]
# A step needs what it reads until it is done. In *chunks* of tokens the loss needs less: a chunk
# goes through head, loss and their backward before the next one comes.
#
# ### Exercise 02-logits: The price of a vocabulary (3 points)


# %% exercise="02-logits"
def logits_at_most(tokens, vocabulary, chunks, kept):
    """The most bytes, of logits and what the table makes of them, that are there at once.

    tokens, vocabulary: ints. chunks: int, into how many the tokens are cut; the largest has
    tokens / chunks, rounded up. kept: True if a variable has the fp32 copy until backward is done.
    Returns {"forward": bytes, "backward": bytes}. For 100 tokens, a vocabulary of 1000, 1 chunk and
    False: 800,000 and 1,200,000.
    """
    ### BEGIN SOLUTION
    logits = -(-tokens // chunks) * vocabulary  # of one chunk
    forward = max(2, 2 + 4, 4 + 4)  # logits; with their fp32 copy; that with log_softmax
    backward = max(4 + 4, 4 + 4 + 4, 4 + 2) + (4 if kept else 0)
    return {"forward": forward * logits, "backward": backward * logits}
    ### END SOLUTION


# %% check="02-logits"
check("02-logits", logits_at_most)

# %% [markdown]
# Twelve bytes a logit. Is that much? Beside it, what a rank of eight holds of model states:

# %%
strategy = specs.Strategy("fsdp", gpus=8)
for name in ("llama2-7b", "llama3-8b", "gemma2-9b"):
    model = specs.model(name)
    states = ledger.model_states(model, recipe, strategy).total
    for kept in (False, True):
        peak = ledger.peak(model, recipe, strategy, ledger.Execution(keeps_logits=kept))
        logits = peak.by_category["logits"]
        print(f"{name:10} states {ledger.gib(states)}, logits {ledger.gib(logits)}", end="")
        print(f", {logits / T / model.vocab_size:.1f} bytes each{', kept' if kept else ''}")

# %% [markdown]
# From one sequence of 8,192 tokens. `del logits` before `backward()` is worth 4 GiB here.

# %% [markdown]
# ## Step 4: when
#
# Parts of a ledger do not add up to a peak: they are not there at the same time. What was saved
# grows in forward and goes in backward; gradients come as it goes; temporaries of the optimizer
# come last. **The peak is the largest of the moments**, and it has a name: where it is.
#
# Take these rules. Forward: each layer saves. The loss's bytes come on top, and go. Backward, from
# the last layer: its gradients come, to stay, and a transient; when it is done what it saved and
# the transient go. Then the update's bytes come and go.
#
# ### Exercise 02-peak: When is the peak? (4 points)


# %% exercise="02-peak"
def peak_of(held, layers, loss, update):
    """Where in a step most bytes are there, and how many.

    held: int, bytes that are there all the time. layers: list of dicts, in the order of forward,
    with "saved", "gradient" and "transient", in bytes. loss, update: ints, bytes for a moment.
    Moments are called "loss", "backward 2" for layers[2], and "update"; no two are equally full.
    Returns {"at": name, "bytes": int}. For 10, one layer of 5, 3 and 4, 2 and 1: at "backward 0"
    there are 10 + 5 + 3 + 4 = 22.
    """
    ### BEGIN SOLUTION
    now, moments = held + sum(layer["saved"] for layer in layers), {}
    moments["loss"] = now + loss
    for i in reversed(range(len(layers))):
        now += layers[i]["gradient"]
        moments[f"backward {i}"] = now + layers[i]["transient"]
        now -= layers[i]["saved"]
    moments["update"] = now + update
    at = max(moments, key=moments.get)
    return {"at": at, "bytes": moments[at]}
    ### END SOLUTION


# %% check="02-peak"
check("02-peak", peak_of)

# %% [markdown]
# Each moment can be the peak of a real job. Three of Llama 3 8B:

# %%
jobs = {
    "ddp, 8,192 tokens": (specs.Recipe("zero-bf16", seq_len=T), "ddp"),
    "fsdp, 8,192 tokens": (specs.Recipe("fsdp-bf16", seq_len=T), "fsdp"),
    "fsdp, 2,048, full checkpointing": (
        specs.Recipe("fsdp-bf16", seq_len=2048, checkpointing="full"),
        "fsdp",
    ),
}

# %%
for name, (job, stage) in jobs.items():
    peak = ledger.peak(llama, job, specs.Strategy(stage, gpus=8))
    print(f"{name:32} {ledger.gib(peak.bytes):>11}, at: {peak.at}")

# %% [markdown]
# The update: PyTorch's AdamW on a GPU makes temporaries for all tensors at once (`foreach`). Before
# the head's backward: all is saved, logits are there. Deep in backward: little was saved, a block
# is computed again, gradients are on their way.
#
# ## Run: a step, byte by byte
#
# A small Llama, four sequences of 128 tokens, fp32. `measure.LiveBytes` notes every tensor as it
# comes and goes. The loss, with a label for what has the vocabulary's width:

# %%
lab = replace(specs.model("lab-25m"), name="lab-3m", vocab_size=2000, hidden_size=192)
lab = replace(lab, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=32, intermediate_size=528)
B, S = 4, 128
tokens = torch.randint(lab.vocab_size, (B, S + 1), generator=torch.Generator().manual_seed(0))
inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
P = lab.parameters
print(f"{P:,} parameters: {16 * P / MIB:.1f} MiB of model states")


# %%
def loss_of(model):
    hidden = model.model(inputs)  # [B, S, H]
    with record_function("logits"):
        logits = model.lm_head(hidden)  # [B, S, V]
        return F.cross_entropy(logits.flatten(0, 1), targets)


# %% [markdown]
# Three steps. Before the second, `zero_grad()` lets all gradients go; before the third,
# `zero_grad(set_to_none=False)` keeps them, filled with zeros, as DDP does in its buckets. Predict:
# which step has the lowest peak, which the highest, and by how much do they differ?


# %%
def trained(model, keeps=(False, False, True)):
    """Three steps: the moments of each, and where its update begins."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    steps = []
    for keep in keeps:
        optimizer.zero_grad(set_to_none=not keep)
        with measure.LiveBytes(model, optimizer) as live:
            loss_of(model).backward()
            backward = len(live.timeline)
            optimizer.step()
        steps.append((live, backward))
    return steps


# %%
steps = trained(models.build(lab))
for name, (live, backward) in zip(("first", "second", "third"), steps, strict=True):
    peak = live.peak
    phase = "update" if live.timeline.index(peak) >= backward else peak.where
    print(f"{name:6} {peak.total:>12,} bytes, in {phase}, after {peak.operator}")

# %% [markdown]
# The first step is the *smallest* at the loss: AdamW makes its states when it first steps. So a job
# that survives its first step can run out of memory in the second. (It can be the other way round
# where the optimizer's temporaries are the peak.) Gradients that are kept cost 4P at the loss;
# those that were let go come as activations go.
#
# Now the prediction. `ledger.CPU` says with which kernels this machine's Llama runs.

# %%
recipe = specs.Recipe("fp32", micro_batch=B, seq_len=S)
predicted = ledger.peak(lab, recipe, specs.Strategy("ddp"), ledger.CPU)
states = predicted.by_category["optimizer_states"]
due = {
    "first: no states, no gradients": predicted.bytes - states - 4 * P,
    "second: no gradients": predicted.bytes - 4 * P,
    "third": predicted.bytes,
}
found = {line: live.peak.total for line, (live, _) in zip(due, steps, strict=True)}
measure.receipt("peak of a step", due, found)

# %% [markdown]
# And the third step's peak by category. Labels end with forward, so gradients of logits are *other*
# to `LiveBytes`; we put them to the logits.

# %%
at_peak = steps[2][0].peak.live
gradients_of_logits = at_peak["other"]
kinds = ("parameters", "gradients", "optimizer_states", "activations")
due = {kind: predicted.by_category[kind] for kind in kinds}
found = {kind: at_peak[kind] for kind in kinds}
due["logits"] = predicted.by_category["logits"]
found["logits"] = at_peak["logits"] + gradients_of_logits
measure.receipt("the third step's peak", due, found)

# %% [markdown]
# Difference 0, in every line: what the operators save was known, and when. (Token ids and targets
# count, 8 bytes each. We hold both through the step, as a training loop holds its batch.)

# %% [markdown]
# Now the whole step, predicted and measured. Moments are not equally many: the ledger has one for
# each event (a block begins, a gradient is there), the tracker one for each operator. A dashed line
# ends backward.

# %%
moments = ledger.timeline(lab, recipe, specs.Strategy("ddp"), ledger.CPU)
end = next(i for i, moment in enumerate(moments) if moment.at == "update")
live, backward = steps[2]
panels = {
    "predicted": ([moment.by_category for moment in moments], end),
    "measured": ([moment.live for moment in live.timeline], backward),
}
alt = "Live bytes in a step, predicted and measured: model states stay, activations grow in "
alt += "forward to a peak at the loss, where logits are on top, and go in backward."
HTML(live_bytes(panels, alt))

# %% [markdown]
# Six steps up, one for each block, and six down. "Other" in the measured picture is whatever
# backward makes, gradients of logits included.
#
# ## Step 5: keep less, compute again
#
# **Activation checkpointing** keeps less than backward needs, and runs forward again when backward
# comes there. *Full*: of each block its input alone. *Selective*: all but the core of explicit
# attention, the scores, which are large and cheap to compute. (Where attention is flash, which does
# that itself, "selective" means other things; torchtitan's keeps the outputs of attention and of
# every second matrix product.)
#
# ### Exercise 02-checkpoint: Kept, or computed again (4 points)


# %% exercise="02-checkpoint"
def checkpointed(kind, layers, block, core):
    """What a step of equal blocks keeps, its peak, and what it computes.

    kind: "none", "selective" or "full". layers: int, how many blocks. block: a dict with bytes of
    its "input", of all that is "saved" (the input among it), and forward's "flops". core: a dict
    with what of these is attention's core: "saved" and "flops". Backward has twice forward's FLOPs.
    Returns {"resident": bytes kept when forward is done, "peak": bytes when backward begins and the
    last block has all back, "flops": of forward, backward and what is computed again}.
    For "full", 4, {"input": 2, "saved": 30, "flops": 100}, …: 8, 36 and 1600.
    """
    ### BEGIN SOLUTION
    dropped, again = {
        "none": (0, 0),
        "selective": (core["saved"], core["flops"]),
        "full": (block["saved"] - block["input"], block["flops"]),
    }[kind]
    resident = layers * (block["saved"] - dropped)
    flops = layers * (3 * block["flops"] + again)  # forward, and twice as much for backward
    return {"resident": resident, "peak": resident + dropped, "flops": flops}
    ### END SOLUTION


# %% check="02-checkpoint"
check("02-checkpoint", checkpointed)

# %% [markdown]
# A third more FLOPs for full. Selective costs little: for GPT-3 Korthikanti et al. give 2.7% more
# FLOPs, for 70% fewer activations.
#
# ## Run: with a checkpoint
#
# `checkpoint_wrapper` makes a block forget. Predict, from the figure above: how high are the six
# steps now? Where is the peak?


# %%
def full(model):
    """Checkpoint each block."""
    layers = model.model.layers
    for i, block in enumerate(layers):
        layers[i] = checkpoint_wrapper(block)
    return model


# %%
again = trained(full(models.build(lab)))
whole = replace(recipe, checkpointing="full")
due = {
    name: ledger.peak(lab, job, specs.Strategy("ddp"), ledger.CPU).bytes
    for name, job in (("no checkpoint", recipe), ("full", whole))
}
found = {name: run[2][0].peak.total for name, run in zip(due, (steps, again), strict=True)}
measure.receipt("peak of the third step", due, found)

# %%
alt = "Live bytes in a step. Without a checkpoint activations are a hill as high as the model "
alt += "states. With one they hardly grow in forward; logits stand out as a spike, and in backward "
alt += "one block after another comes and goes, six teeth."
panels = {
    name: ([moment.live for moment in run[2][0].timeline], run[2][1])
    for name, run in (("no checkpoint", steps), ("full", again))
}
HTML(live_bytes(panels, alt))

# %% [markdown]
# The hill is gone; in its place six teeth, one block at a time. (What backward computes again is
# "other" to the tracker.) What remains is the spike at the loss: **after checkpointing the logits
# are often the peak**, and only chunks, or fewer tokens, lower that.
#
# And the price? Matrix products, counted by PyTorch. By hand: 2 FLOPs for each weight and token,
# three times; a fourth time in blocks. Predict the ratio.

# %%
head = lab.vocab_size * lab.hidden_size
blocks = sum(x.numel for x in lab.tensors() if x.layer is not None and len(x.shape) == 2)
flops = {}
for name, model in (("none", models.build(lab)), ("full", full(models.build(lab)))):
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    flops[name] = counter.get_total_flops()

# %%
by_hand = {"none": 6 * B * S * (blocks + head), "full": 2 * B * S * (4 * blocks + 3 * head)}
for name in flops:
    print(f"{name}: {flops[name]:,} FLOPs; by hand {by_hand[name]:,}")
missing = (by_hand["full"] - flops["full"]) / (2 * B * S * lab.num_layers)
print(f"fewer, in weights of a block: {missing:,.0f} = {lab.intermediate_size} x {lab.hidden_size}")

# %% [markdown]
# It is cheaper than by hand! 528 × 192 is down_proj. Nothing saves the *output* of a block's last
# product, so PyTorch stops computing again when it comes there ("early stop").
#
# ## Run: why did FSDP not save memory?
#
# People shard a model over many GPUs, look at the peak, and are disappointed. Two ranks, each with
# as many tokens as our one had, and FSDP of this course (lessons 08 and 09). Predict the peak, with
# and without a checkpoint: half of what it was?


# %%
def sharded(checkpointing):
    """The moments of a second step under FSDP, and where its update begins."""
    model = models.build(lab)
    if checkpointing == "full":
        full(model)
    FSDP(model, model.model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    mine = (inputs + dist.get_rank()) % lab.vocab_size
    for _ in range(2):
        optimizer.zero_grad()
        with measure.LiveBytes(model, optimizer) as live:
            F.cross_entropy(model(mine).flatten(0, 1), targets).backward()
            backward = len(live.timeline)
            optimizer.step()
    return [moment.live for moment in live.timeline], backward


# %% tags=["nbval-ignore-output"]
fsdp = {kind: ranks.run(sharded, world_size=2, args=(kind,))[0] for kind in ("none", "full")}
due, found = {}, {}
for kind, (moments, _) in fsdp.items():
    job = replace(recipe, checkpointing=kind)
    name = f"FSDP on 2 ranks, checkpointing {kind}"
    peak = ledger.peak(lab, job, specs.Strategy("fsdp", gpus=2), ledger.CPU)
    due[name] = peak.bytes + (0 if "reach" in peak.at else 8 * B * S)  # targets, see below
    found[name] = max(sum(live.values()) for live in moments)
measure.receipt("peak of a rank", due, found)

# %% tags=["nbval-ignore-output"]
alt = "Live bytes of a rank under FSDP. Model states are half as high as before. Without a "
alt += "checkpoint the hill of activations stands unchanged on top of them; with one there are six "
alt += "teeth in backward, and the peak is one of them."
panels = {f"FSDP, {kind}": step for kind, step in fsdp.items()}
HTML(live_bytes(panels, alt))

# %% [markdown]
# (The second peak comes after the loss, deep in backward. There our loop still holds the targets, 8
# bytes each, and the ledger has let them go; so we added them. And a thread of gloo may let go of a
# buffer late: then it is some KiB more.)

# %% [markdown]
# Model states are half at rest, and a little more while blocks are whole. Activations are what they
# were, since each rank has its own tokens. FSDP shards *states*. Here they were 45% of the peak, so
# half of them is little. The same for Llama 3 8B, with one sequence of 8,192 tokens on each rank:

# %%
rows = {"8 GPUs": {}, "64 GPUs": {"gpus": 64}, "512 GPUs": {"gpus": 512}}
rows |= {"8 GPUs, one unit": {"wrap": "model"}}
rows |= {"8 GPUs, full": {"checkpointing": "full"}}
rows |= {"8 GPUs, full, 8 chunks": {"checkpointing": "full", "loss_chunks": 8}}

# %%
print(
    f"{'GiB on a rank':24}{'states':>8}{'gathered':>9}{'activations':>12}{'logits':>8}{'peak':>7}"
)
for name, row in rows.items():
    job = specs.Recipe("fsdp-bf16", seq_len=T, checkpointing=row.get("checkpointing", "none"))
    cut = specs.Strategy("fsdp", gpus=row.get("gpus", 8), wrap=row.get("wrap", "layer"))
    peak = ledger.peak(llama, job, cut, ledger.Execution(loss_chunks=row.get("loss_chunks", 1)))
    part = {kind: nbytes / 2**30 for kind, nbytes in peak.by_category.items()}
    states = sum(part.get(kind, 0) for kind in ("parameters", "gradients", "optimizer_states"))
    gathered = part.get("gather_buffers", 0) + part.get("reduce_buffers", 0)
    print(f"{name:24}{states:8.1f}{gathered:9.1f}{part['activations']:12.1f}", end="")
    print(f"{part.get('logits', 0):8.1f}{peak.bytes / 2**30:7.1f}")

# %% [markdown]
# Read it row by row.
#
# - More GPUs: 64 times as many lower the peak by a sixth. What is left is each rank's own.
# - One unit: nobody wrapped the blocks, and the whole model is gathered at once.
# - Full checkpointing: this is the change that helps. Then the logits are the largest part.
# - The loss in chunks helps then. The peak is now deep in backward, where gradients are.
#
# So, when FSDP "saves nothing": activations dominate; or there is one unit; or N is small; or
# somebody looks at *reserved*.

# %% [markdown]
# ## Step 6: allocated and reserved
#
# PyTorch's CUDA allocator asks the driver for blocks and keeps them. **Allocated** is what live
# tensors have; **reserved** is all blocks, and it is what `nvidia-smi` sees (with the CUDA context
# on top). It shrinks only when memory runs out, or for `torch.cuda.empty_cache()`: until then a
# block that fits no tensor is lost.

# %% [markdown]
# Write such an allocator, a simple one: a new tensor takes the smallest free block that is large
# enough, whole; if there is none, a new block of its size is reserved. (PyTorch's splits large
# blocks, and joins neighbours again.)
#
# ### Exercise 02-allocated: Allocated, reserved (4 points)


# %% exercise="02-allocated"
def allocator(events):
    """What tensors have at most, and what the allocator has reserved in the end.

    events: list of [name, size]. A size above 0: a tensor of that name and that many bytes comes.
    A size of 0: the tensor of that name goes, and its block is free for others.
    Returns {"allocated": the most bytes that live tensors asked for at once, "reserved": bytes of
    all blocks}. For a 10, b 5, a 0, c 8, d 3: c takes a's block, d has a new one: 16 and 18.
    """
    ### BEGIN SOLUTION
    live, cached, most, reserved = {}, [], 0, 0
    for name, size in events:
        if size == 0:
            cached.append(live.pop(name)[1])
            continue
        fitting = [block for block in cached if block >= size]
        block = min(fitting, default=size)
        if fitting:
            cached.remove(block)
        else:
            reserved += size
        live[name] = size, block
        most = max(most, sum(asked for asked, _ in live.values()))
    return {"allocated": most, "reserved": reserved}
    ### END SOLUTION


# %% check="02-allocated"
check("02-allocated", allocator)

# %% [markdown]
# How much is reserved depends on the order of everything, so the ledger gives an interval: from the
# peak itself, if every block found its next tensor, to the most of each kind added up, if nothing
# ever took memory that something of another kind let go.
#
# A published job: Llama 2 7B, FSDP2 on 8 H100, 8 sequences of 2,048, full checkpointing.
# torchtitan's authors measured a peak of 22.73 GiB allocated ("active") and 31.02 reserved. As far
# as their code of that time shows, the norm was unfused, the loop kept the logits, and the last
# block was not freed after forward.

# %%
job = specs.Recipe("fsdp-bf16", micro_batch=8, seq_len=2048, checkpointing="full")
kernels = ledger.Execution(norm="unfused", keeps_logits=True)
eight = specs.Strategy("fsdp", gpus=8)
peak = ledger.peak(specs.model("llama2-7b"), job, eight, kernels, keeps_last=True)
print(f"allocated: {ledger.gib(peak.bytes)}, published 22.73")
print(f"reserved: between {ledger.gib(peak.bytes)} and {ledger.gib(peak.apart)}, published 31.02")

# %% [markdown]
# ## A real job, from the command line
#
# Read this one as you would for a colleague: Llama 3 8B, FSDP on 8 H100, 8,192 tokens. Does it fit?
# What is the peak made of, and when? Which one change?

# %% tags=["nbval-ignore-output"]
command = "ledger --model llama3-8b --strategy fsdp --gpus 8 --gpu h100-sxm-80 --seq-len 8192"
shown = subprocess.run(
    [sys.executable, "-m", "course_lib.cli", *command.split()],
    env=os.environ | {"FORCE_COLOR": ""},
    capture_output=True,
    text=True,
)
print(f"$ course {command}\n")
print(shown.stdout or shown.stderr)

# %% [markdown]
# The first lines are the answer; the tables are its parts. States of 15 GiB would fit five times,
# and the job does not: activations. Precision is `amp-bf16` unless you say otherwise: fp32
# parameters, gathered in fp32. Try `--precision fsdp-bf16`, and `--checkpointing full`. Before each
# run: what will the peak be made of?

# %% [markdown]
# ## Say it out loud
#
# 1. Derive 34sbh + 5as²b for a layer of GPT, operator by operator. What does flash attention
#    remove?
# 2. What does a Llama block save, in units of the hidden size?
# 3. Llama 3's vocabulary, 8,192 tokens: how many bytes at the loss, and what is each of the twelve?
# 4. Where in a step can the peak be? What moves it?
# 5. Full checkpointing: what is kept, what is the peak, what does it cost?
# 6. Why did FSDP on 64 GPUs not save more than on 8?
# 7. The first step ran, the second was out of memory. Why?
# 8. `nvidia-smi` shows 31 GiB, your ledger says 23. Who is right?

# %% [markdown]
# ## Summary
#
# - Activations are what operators save: sbh(34 + 5as/h) in a GPT layer, 34sbh with flash.
# - A Llama block: six tensors of h, k and v, four of the inner width; each tensor once.
# - Logits: 12 bytes for each token and word at the loss, 16 if kept; 1/n in chunks.
# - The peak is the largest moment: at the loss, deep in backward, or in the update.
# - Full checkpointing: a block's input each, one block back at a time, a fourth forward's FLOPs.
# - FSDP shards states. Activations and logits are each rank's own.
# - Reserved is what was ever needed in blocks; allocated what tensors have.

# %% [markdown]
# ## Further reading
#
# - Korthikanti et al. 2022, *Reducing Activation Recomputation* (arXiv 2205.05198): sections 4 and
#   5.
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174).
# - Dao et al. 2022, *FlashAttention* (arXiv 2205.14135): section 3.1 for what it recomputes.
# - PyTorch's documentation: *Understanding CUDA Memory Usage*, memory snapshots of a real job.
# - torchtitan's pull request 165: the published peaks above.
#
# Next: lesson 03 prices the other side of the trade, communication.
