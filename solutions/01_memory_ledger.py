# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 01 · The memory ledger
#
# After this lesson you can, by hand,
# - count the parameters of a Llama-shaped model from its `config.json`;
# - turn parameters into bytes for any precision recipe, and say why it is 16 per parameter, or 18,
#   or 20;
# - give the bytes per rank for ZeRO stage 0 to 3, and the largest model that fits;
# - say why the optimizer's states dwarf the weights.
#
# At the end you train a real model and its bytes equal your ledger: difference 0.
#
# Time: 60 to 90 minutes.

# %%
import torch

from course_lib import explorers, ledger, measure, models, specs
from course_lib.checks import check
from course_lib.sharded.master_weights import MasterWeights

# %% [markdown]
# ## Play first
#
# Each bar is what one rank holds; the dashed line is the GPU. Before you touch anything, guess: how
# many ranks does the largest model need until some stage fits? Then try. Which control changes the
# weights' part, which only the optimizer's?

# %% tags=["explorer", "nbval-ignore-output"]
explorers.memory_ledger(model="llama3-8b", ranks=8)

# %% [markdown]
# ## Step 1: count the parameters
#
# A Llama block has attention and an MLP, each with a norm before it. With hidden size h, MLP width i,
# and K/V heads that are fewer than the query heads (*grouped-query attention*), its tensors are:

# %%
spec = specs.model("llama3-8b")
for tensor in spec.tensors():
    if tensor.layer == 0:
        print(f"{tensor.name.removeprefix('model.layers.0.'):34} {tensor.shape}")

# %% [markdown]
# A weight's shape is (outputs, inputs). K and V have 1024 rows, not 4096: 8 heads of 128 instead of
# 32. The norm is RMSNorm, which has a weight and no bias.
#
# ### Exercise 01-block: Count a Llama block (3 points)


# %% exercise="01-block"
def block_parameters(config):
    """Count the parameters of one block.

    config: a dict as in config.json, with hidden_size, intermediate_size,
    num_attention_heads and num_key_value_heads; no biases anywhere.
    Returns an int: for Llama 3 8B it is 218,112,000.
    """
    ### BEGIN SOLUTION
    h, i = config["hidden_size"], config["intermediate_size"]
    head_dim = h // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    attention = h * h + 2 * h * kv + h * h  # q, k and v, o
    mlp = 3 * h * i  # gate, up, down
    norms = 2 * h
    return attention + mlp + norms
    ### END SOLUTION


# %% check="01-block"
check("01-block", block_parameters)

# %% [markdown]
# Around the blocks stand the token embedding, one last norm, and the output head. The head maps
# hidden to vocabulary; where `tie_word_embeddings` is true it *is* the embedding, used twice.
#
# ### Exercise 01-model: Count a whole model from its config (3 points)


# %% exercise="01-model"
def model_parameters(config, block):
    """Count the parameters of a Llama-shaped model.

    config: as before, with num_hidden_layers, vocab_size and tie_word_embeddings too.
    block: the parameters of one block, an int.
    Returns an int: for Llama 3 8B, with block = 218,112,000, it is 8,030,261,248.
    """
    ### BEGIN SOLUTION
    h, vocab = config["hidden_size"], config["vocab_size"]
    embedding = vocab * h
    head = 0 if config["tie_word_embeddings"] else vocab * h
    return embedding + config["num_hidden_layers"] * block + h + head
    ### END SOLUTION


# %% check="01-model"
check("01-model", model_parameters)

# %% [markdown]
# The course reads real `config.json` files the same way. Names on the tin are rounded: the "7B" has
# 6.74 billion, and a mixture of experts has two counts: all, and those that one token passes.

# %%
for name in ("llama2-7b", "llama3-8b", "qwen2.5-7b", "gemma2-9b", "mixtral-8x7b"):
    model = specs.model(name)
    print(f"{name:14} {model.parameters:>15,} in all  {model.active_parameters:>15,} active")

# %% [markdown]
# ## Step 2: price a parameter in bytes
#
# Training keeps more than weights. Mixed-precision AdamW, as the ZeRO paper counts it, holds for
# *each* parameter:
#
# | line | precision | bytes |
# |---|---|---|
# | parameter | fp16 or bf16 | 2 |
# | gradient | fp16 or bf16 | 2 |
# | master copy of the parameter | fp32 | 4 |
# | first moment m | fp32 | 4 |
# | second moment v | fp32 | 4 |
# | **together** | | **16** |

# %% [markdown]
# Why a master copy? Because 16 bits lose small updates. Between 1 and the next bf16 number lies
# 0.0078. Predict what is left of an update of 0.0006, a usual size:

# %%
weight = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    weight -= 0.0006
print("bf16 after 1000 updates:", weight.item())
print("what fp32 would give:   ", 1.0 - 1000 * 0.0006)

# %% [markdown]
# Nothing is left, a thousand times over. The master copy remembers what 16 bits cannot; it is updated
# by the optimizer alone, so it is counted with the optimizer's states. The last three lines make 12
# of the 16 bytes: **that is why optimizer states dwarf the weights.**
#
# ### Exercise 01-recipe: Bytes per parameter (4 points)


# %% exercise="01-recipe"
def bytes_per_parameter(parameter_bytes, gradient_bytes, master, moments):
    """Price one parameter under a precision recipe, in bytes.

    parameter_bytes, gradient_bytes: size of one parameter, of one gradient (2 or 4).
    master: True if the optimizer keeps an fp32 copy of the parameter.
    moments: how many fp32 values the optimizer keeps for it (AdamW 2, SGD 0).
    Returns {"parameters": …, "gradients": …, "optimizer_states": …}:
    for (2, 2, True, 2) it is 2, 2 and 12.
    """
    ### BEGIN SOLUTION
    return {
        "parameters": parameter_bytes,
        "gradients": gradient_bytes,
        "optimizer_states": (4 if master else 0) + 4 * moments,
    }
    ### END SOLUTION


# %% check="01-recipe"
check("01-recipe", bytes_per_parameter)

# %% [markdown]
# ### Why 16 here, 18 there, and 20
#
# Gradients accumulated in fp32 add 2 bytes: 18. An fp32 copy of the gradient beside the fp16 one adds
# 4: 20. Megatron-LM documents both. All of these are "mixed-precision Adam", so when somebody says
# 16, ask which recipe.

# %%
for precision in ("fp32", "amp-bf16", "zero-fp16", "megatron-bf16", "megatron-fp16", "pure-bf16"):
    copies = specs.Recipe(precision).copies()
    print(f"{precision:14} {' + '.join(str(copy.bytes) for copy in copies):24}", end="")
    print(f"= {sum(copy.bytes for copy in copies)} bytes per parameter")

# %% [markdown]
# Autocast (`amp-bf16`) saves no model states at all: it keeps fp32 weights and casts copies on the
# fly. What it saves is activations and time.
#
# ## Step 3: share the bytes out
#
# Data parallelism gives every rank all 16 bytes. ZeRO shards one more line at each stage, over N ranks:
#
# | stage | whole on every rank | sharded | bytes per rank |
# |---|---|---|---|
# | 0 (DDP) | all | nothing | 16P |
# | 1 | parameters, gradients | optimizer states | 4P + 12P/N |
# | 2 | parameters | and gradients | 2P + 14P/N |
# | 3 | nothing | and parameters | 16P/N |

# %% [markdown]
# P is seldom a multiple of N. The last shard is then padded, and every rank holds P/N *rounded up*.
#
# ### Exercise 01-stages: Bytes per rank, stage by stage (4 points)


# %% exercise="01-stages"
def rank_bytes(parameters, ranks, stage):
    """Bytes of model states on the rank that holds most, for 2 + 2 + 12 bytes.

    parameters, ranks: ints, at least 1. stage: 0, 1, 2 or 3.
    A sharded line costs its bytes times the shard: parameters / ranks, rounded up.
    Returns an int: rank_bytes(10, 4, 1) is 2*10 + 2*10 + 12*3 = 76.
    """
    ### BEGIN SOLUTION
    shard = -(-parameters // ranks)
    states = 12 * (shard if stage >= 1 else parameters)
    gradients = 2 * (shard if stage >= 2 else parameters)
    weights = 2 * (shard if stage >= 3 else parameters)
    return weights + gradients + states
    ### END SOLUTION


# %% check="01-stages"
check("01-stages", rank_bytes)

# %% [markdown]
# The three questions, asked at every stage of this course: *what exactly is sharded that was not
# before? Why does it save memory? Why does it cost more?* The first two you can answer now. The
# third is communication, and lesson 03 prices it.

# %%
paper = specs.model("paper-7.5b")
for strategy in ("ddp", "zero1", "zero2", "zero3"):
    states = ledger.model_states(
        paper, specs.Recipe("zero-fp16"), specs.Strategy(strategy, gpus=64)
    )
    print(f"{strategy:6} {states.total / 1e9:8.3f} GB  {ledger.gib(states.total)}")

# %% [markdown]
# Turn the question round: given the GPU, how large may the model be? Leave activations out for now,
# so this is a bound that no real job reaches.
#
# ### Exercise 01-largest: The largest model that fits (3 points)


# %% exercise="01-largest"
def largest_model(gib, ranks, stage):
    """The largest number of parameters whose model states fit, at 2 + 2 + 12 bytes.

    gib: the GPU's memory in GiB (2**30 bytes), an int. ranks, stage: as before.
    Take the shard as parameters / ranks exactly (no padding), and round down at the end.
    Returns an int: largest_model(1, 1, 0) is 2**30 // 16 = 67,108,864.
    """
    ### BEGIN SOLUTION
    memory = gib * 2**30
    whole = (16, 4, 2, 0)[stage]  # bytes per parameter held by every rank
    sharded = 16 - whole
    return memory * ranks // (whole * ranks + sharded)
    ### END SOLUTION


# %% check="01-largest"
check("01-largest", largest_model)

# %% [markdown]
# ## Against the paper
#
# The ZeRO paper's table 1 gives GB per device for three models and six degrees of parallelism. With
# your formulas you can reproduce all 54 cells.
#
# ### Exercise 01-zero-table: The ZeRO paper's table 1 (3 points)


# %% exercise="01-zero-table"
def zero_table_row(parameters, ranks):
    """One row of the table for mixed-precision Adam (K = 12), not rounded.

    parameters: a float or int; ranks: an int.
    Returns [P_os, P_os+g, P_os+g+p] in decimal GB: for 7.5e9 on 1 rank it is
    [120.0, 120.0, 120.0].
    """
    ### BEGIN SOLUTION
    per_parameter = (4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    return [size * parameters / 1e9 for size in per_parameter]
    ### END SOLUTION


# %% check="01-zero-table"
check("01-zero-table", zero_table_row)

# %% [markdown]
# Here is the ledger of the course beside the printed table, for the 7.5B model. Differences are the
# paper's rounding; for large cells it truncates.

# %%
for row in ledger.zero_table1():
    if row.parameters == paper.parameters:
        stages = [specs.Strategy(name, gpus=row.ranks) for name in ("zero1", "zero2", "zero3")]
        ours = [ledger.model_states(paper, specs.Recipe("zero-fp16"), s).total for s in stages]
        print(f"N = {row.ranks:<5} ours {[round(x / 1e9, 3) for x in ours]}  paper {row.cells}")

# %% [markdown]
# ## Run: a real model, real bytes
#
# Now the proof. `lab-25m` is Llama-shaped and small enough for any laptop. Predict its ledger for
# plain fp32 AdamW: 4 + 4 + 8 bytes per parameter.

# %%
lab = specs.model("lab-25m")
print(f"{lab.parameters:,} parameters in {len(lab.tensors())} tensors")
print(f"predicted: {16 * lab.parameters:,} bytes")

# %% [markdown]
# Build it, take two AdamW steps, and ask the tensors' storages how large they are.

# %%
model = models.build(lab)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(lab.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
for step in range(2):
    optimizer.zero_grad()
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

# %%
by_hand = {
    "parameters": 4 * lab.parameters,
    "gradients": 4 * lab.parameters,
    "optimizer_states": 8 * lab.parameters,
}
measured = measure.model_state_bytes(model, optimizer)
measure.receipt("fp32 AdamW, by hand", by_hand, measured)

# %% [markdown]
# It does not balance! Almost, but the optimizer holds a few hundred bytes more. Guess before you go
# on: what else does AdamW keep? Divide the difference by the number of tensors.

# %%
state = optimizer.state[model.lm_head.weight]
for name, value in state.items():
    print(f"{name:11} {tuple(value.shape)!s:14} {value.dtype}")

# %% [markdown]
# A step counter: one fp32 number for each parameter *tensor*. The course's ledger knows about it.

# %%
predicted = ledger.model_states(lab, specs.Recipe("fp32"), specs.Strategy("ddp"))
predicted

# %%
measure.receipt("fp32 AdamW", predicted.by_category(), measured)

# %% [markdown]
# Difference 0. Now bf16 parameters and gradients with fp32 master weights: 2 + 2 + 12. The class
# `MasterWeights` is 20 lines; open it and read how a step goes.

# %%
model = models.build(lab, dtype=torch.bfloat16)
optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
for step in range(2):
    optimizer.zero_grad()
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.2f}")

# %%
predicted = ledger.model_states(lab, specs.Recipe("zero-bf16"), specs.Strategy("ddp"))
measured = measure.model_state_bytes(model, optimizer)
measure.receipt("bf16 AdamW with fp32 master weights", predicted.by_category(), measured)

# %% [markdown]
# Both recipes take 16 bytes per parameter: mixed precision moved bytes from the weights to the
# optimizer, it saved none. But now 12 of the 16 are in the line that ZeRO shards first.

# %% [markdown]
# ## Say it out loud
#
# 1. Derive 16 bytes per parameter, line by line, without notes.
# 2. A colleague says 18. Who is right?
# 3. How many bytes per rank does a 7.5B model take on 64 GPUs at stage 1, 2 and 3?
# 4. Why does stage 1 save more than stage 2 adds to it?
# 5. Why did going from fp32 to mixed precision not shrink the model states?

# %% [markdown]
# ## Summary
#
# - A Llama block: two h×h, two h×kv, three h×i, two norms; the head may be the embedding.
# - Mixed-precision AdamW: 2 + 2 + (4 + 4 + 4) = 16 bytes per parameter; 18 with fp32 gradients, 20
#   with an extra fp32 copy.
# - ZeRO shards optimizer states, then gradients, then parameters: 4P+12P/N, 2P+14P/N, 16P/N.
# - The rank that holds most has the rounded-up share.
# - Real bytes equal the ledger once the step counters are counted.

# %% [markdown]
# ## Further reading
#
# - Rajbhandari et al. 2019 (arXiv 1910.02054), section 3.1 and table 1: where model states go.
# - Micikevicius et al. 2017, *Mixed Precision Training* (arXiv 1710.03740): why a master copy.
# - Megatron-LM's documentation of its distributed optimizer: the 18 and 20 byte recipes.
#
# Next: lesson 02 adds activations and asks *when* in the step the peak is.
