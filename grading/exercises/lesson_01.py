"""Lesson 01, The memory ledger: count parameters, price them in bytes, shard the bytes."""

from random import Random

from course_lib import ledger, specs
from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

# --- 01-block: the parameters of one Llama block ------------------------------------------------


def block_parameters(config):
    h, i = config["hidden_size"], config["intermediate_size"]
    head_dim = h // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    attention = h * h + 2 * h * kv + h * h  # q, k and v, o
    mlp = 3 * h * i  # gate, up, down
    norms = 2 * h
    return attention + mlp + norms


def _block_by_tensors(config):
    h, i, a = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
    kv = h * config["num_key_value_heads"] // a
    shapes = [(h, h), (kv, h), (kv, h), (h, h), (i, h), (i, h), (h, i), (h, 1), (h, 1)]
    return sum(rows * columns for rows, columns in shapes)


def _block(change):
    """A wrong count: the right one, plus what `change` makes of the sizes h, i and kv."""

    def answer(config):
        h, i = config["hidden_size"], config["intermediate_size"]
        kv = h * config["num_key_value_heads"] // config["num_attention_heads"]
        return block_parameters(config) + change(h, i, kv)

    return answer


def _config(h: int, i: int, heads: int, kv_heads: int, layers: int = 2, vocab: int = 512) -> dict:
    return {
        "hidden_size": h,
        "intermediate_size": i,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


def _some_config(rng: Random) -> dict:
    head_dim, kv = rng.choice((16, 64, 128)), rng.choice((1, 2, 4))
    heads = kv * rng.choice((2, 3, 4))
    h = heads * head_dim
    return _config(
        h, h * 3 + 8 * rng.randrange(1, 9), heads, kv, rng.randrange(2, 40), 1000 * heads
    )


LLAMA3_8B = _config(4096, 14336, 32, 8, layers=32, vocab=128_256)

BLOCK = Exercise(
    id="01-block",
    title="Count a Llama block",
    task="Return the number of parameters in one block: attention, MLP and the two norms.",
    points={"all": 3},
    reference=block_parameters,
    alternatives=(_block_by_tensors,),
    cases=(
        Case("a tiny block", (_config(8, 20, 4, 2),)),
        Case("Llama 3 8B", (LLAMA3_8B,)),
    ),
    fresh=lambda rng: [Case("a random block", (_some_config(rng),)) for _ in range(4)],
    library=(specs.read_config, specs.ModelSpec.tensors, specs.ModelSpec.parameters),
    nudge="List the nine tensors with their shapes: q, k, v, o, gate, up, down and two norms.",
    misconceptions=(
        Misconception(
            "multi-head instead of grouped-query",
            _block(lambda h, i, kv: 2 * h * (h - kv)),
            "You gave K and V as many heads as Q. With grouped-query attention they have only "
            "`num_key_value_heads`, so each is kv_heads * head_dim by hidden.",
            "head_dim is hidden_size // num_attention_heads, for Q, K and V alike.",
        ),
        Misconception(
            "two MLP matrices",
            _block(lambda h, i, kv: -h * i),
            "You counted two matrices in the MLP. SwiGLU has three: gate, up and down.",
            "All three have hidden * intermediate elements.",
        ),
        Misconception(
            "norms forgotten",
            _block(lambda h, i, kv: -2 * h),
            "You left out the norms: each block has two, with one weight per hidden dimension.",
            "They are tiny, but the receipt balances to the byte.",
        ),
        Misconception(
            "one norm",
            _block(lambda h, i, kv: -h),
            "You counted one norm; a block has two, before attention and before the MLP.",
        ),
        Misconception(
            "K or V forgotten",
            _block(lambda h, i, kv: -h * kv),
            "You counted one of K and V; a block has both.",
        ),
        Misconception(
            "output projection forgotten",
            _block(lambda h, i, kv: -h * h),
            "You left out the attention's output projection, hidden by hidden.",
        ),
        Misconception(
            "intermediate size taken as 4h",
            _block(lambda h, i, kv: 3 * h * (4 * h - i)),
            "You took 4 * hidden for the MLP's width. Read `intermediate_size`: with three "
            "matrices instead of two, Llama makes it narrower.",
        ),
        Misconception(
            "norms with biases",
            _block(lambda h, i, kv: 2 * h),
            "You are 2 * hidden too high: a block has two norms, and RMSNorm has a weight alone, "
            "no bias.",
        ),
    ),
)

# --- 01-model: the whole model ------------------------------------------------------------------


def model_parameters(config, block):
    h, vocab = config["hidden_size"], config["vocab_size"]
    embedding = vocab * h
    head = 0 if config["tie_word_embeddings"] else vocab * h
    return embedding + config["num_hidden_layers"] * block + h + head


def _model_by_tables(config, block):
    tables = 1 if config["tie_word_embeddings"] else 2
    outside = tables * config["vocab_size"] + 1
    return outside * config["hidden_size"] + block * config["num_hidden_layers"]


def _model(change):
    def answer(config, block):
        table = config["vocab_size"] * config["hidden_size"]
        tied = config["tie_word_embeddings"]
        return model_parameters(config, block) + change(table, config["hidden_size"], block, tied)

    return answer


def _model_case(name: str, config: dict, tied: bool) -> Case:
    return Case(
        f"{name}, {'tied' if tied else 'untied'}",
        (config | {"tie_word_embeddings": tied}, block_parameters(config)),
        part="tied embeddings" if tied else "untied embeddings",
    )


def _fresh_models(rng: Random) -> list[Case]:
    return [_model_case("a random model", _some_config(rng), tied) for tied in (False, True) * 2]


MODEL = Exercise(
    id="01-model",
    title="Count a whole model from its config",
    task="Return the number of parameters of the model: embedding, blocks, final norm and head.",
    points={"untied embeddings": 2, "tied embeddings": 1},
    reference=model_parameters,
    alternatives=(_model_by_tables,),
    cases=(
        _model_case("a tiny model", _config(8, 20, 4, 2), tied=False),
        _model_case("a tiny model", _config(8, 20, 4, 2), tied=True),
        _model_case("Llama 3 8B", LLAMA3_8B, tied=False),
    ),
    fresh=_fresh_models,
    library=(specs.read_config, specs.ModelSpec.tensors, specs.ModelSpec.parameters),
    nudge="Four terms: vocab * hidden, layers * block, hidden, and vocab * hidden again if untied.",
    misconceptions=(
        Misconception(
            "condition reversed",
            _model(lambda table, h, block, tied: table if tied else -table),
            "Your condition is the wrong way round: tied embeddings need no second table, untied "
            "ones do.",
        ),
        Misconception(
            "head counted although tied",
            _model(lambda table, h, block, tied: table if tied else 0),
            "You counted the output head although `tie_word_embeddings` is true: the head then is "
            "the embedding, one tensor used twice.",
        ),
        Misconception(
            "head forgotten",
            _model(lambda table, h, block, tied: 0 if tied else -table),
            "You left out the output head. It is a table as large as the embedding, unless the "
            "two are tied.",
        ),
        Misconception(
            "final norm forgotten",
            _model(lambda table, h, block, tied: -h),
            "You left out the final norm after the last block: hidden_size weights.",
        ),
        Misconception(
            "embedding forgotten",
            _model(lambda table, h, block, tied: -table),
            "You left out the token embedding, vocab_size by hidden_size.",
        ),
        Misconception(
            "one block",
            lambda config, block: model_parameters(config | {"num_hidden_layers": 1}, block),
            "You counted one block; the model has `num_hidden_layers` of them.",
        ),
        Misconception(
            "blocks only",
            lambda config, block: config["num_hidden_layers"] * block,
            "You counted the blocks alone. The embedding, the final norm and the head come on "
            "top; with a large vocabulary they are a seventh of an 8B model.",
        ),
        Misconception(
            "bias on the head",
            _model(lambda table, h, block, tied: table // h),
            "You gave the output head a bias of vocab_size; Llama's head has none.",
        ),
    ),
)

# --- 01-recipe: bytes per parameter -------------------------------------------------------------


def bytes_per_parameter(parameter_bytes, gradient_bytes, master, moments):
    return {
        "parameters": parameter_bytes,
        "gradients": gradient_bytes,
        "optimizer_states": (4 if master else 0) + 4 * moments,
    }


def _recipe_by_list(parameter_bytes, gradient_bytes, master, moments):
    fp32_copies = [4] * (int(master) + moments)
    keys = ("parameters", "gradients", "optimizer_states")
    return dict(zip(keys, (parameter_bytes, gradient_bytes, sum(fp32_copies)), strict=True))


def _recipe(change):
    def answer(*args):
        return bytes_per_parameter(*args) | change(*args)

    return answer


def _recipe_cases(name: str, *args) -> list[Case]:
    return [Case(name, args, part) for part in ("parameters", "gradients", "optimizer_states")]


RECIPES = {  # name: bytes of a parameter, of a gradient; fp32 master copy; fp32 moments
    "fp32 AdamW": (4, 4, False, 2),
    "bf16 AdamW with an fp32 master copy": (2, 2, True, 2),
    "bf16 AdamW, fp32 gradients and master": (2, 4, True, 2),
    "fp32 SGD": (4, 4, False, 0),
    "bf16 SGD with momentum and master": (2, 2, True, 1),
}

RECIPE = Exercise(
    id="01-recipe",
    title="Bytes per parameter",
    task="Return the bytes per parameter of parameters, gradients and optimizer_states.",
    points={"parameters": 1, "gradients": 1, "optimizer_states": 2},
    reference=bytes_per_parameter,
    alternatives=(_recipe_by_list,),
    cases=tuple(c for name, args in RECIPES.items() for c in _recipe_cases(name, *args)),
    run=call_for_a_line,
    library=(ledger.model_states,),
    nudge="The optimizer's states are fp32, 4 bytes each: moments, and the master if it is kept.",
    misconceptions=(
        Misconception(
            "master copy forgotten",
            _recipe(lambda p, g, master, m: {"optimizer_states": 4 * m}),
            "You left out the fp32 master copy. It is kept by the optimizer, since a small update "
            "would vanish in 16 bits, and costs 4 bytes per parameter.",
        ),
        Misconception(
            "moments in the parameter's precision",
            _recipe(lambda p, g, master, m: {"optimizer_states": 4 * master + p * m}),
            "You keep the moments in the parameters' precision; in these recipes they are fp32, "
            "4 bytes each.",
        ),
        Misconception(
            "all states in the parameter's precision",
            _recipe(lambda p, g, master, m: {"optimizer_states": p * (master + m)}),
            "You keep all of the optimizer's states in the parameters' precision, the master too. "
            "They are fp32, 4 bytes each: that is what a master copy is for.",
        ),
        Misconception(
            "one moment",
            _recipe(lambda p, g, master, m: {"optimizer_states": 4 * master + 4 * min(m, 1)}),
            "You counted one moment. Adam keeps two, the mean of the gradient and of its square.",
        ),
        Misconception(
            "always Adam",
            _recipe(lambda p, g, master, m: {"optimizer_states": 4 * master + 8}),
            "You always count two moments: that is Adam. Use `moments`: SGD keeps none, with "
            "momentum one.",
        ),
        Misconception(
            "always a master copy",
            _recipe(lambda p, g, master, m: {"optimizer_states": 4 + 4 * m}),
            "You count a master copy even where there is none: with fp32 parameters the "
            "parameters themselves are the master.",
        ),
        Misconception(
            "gradients in the parameters' precision",
            _recipe(lambda p, g, master, m: {"gradients": p}),
            "You gave the gradients the parameters' precision. Some recipes accumulate them in "
            "fp32: that is the step from 16 to 18 bytes.",
        ),
        Misconception(
            "master copy counted as parameters",
            _recipe(
                lambda p, g, master, m: {"parameters": p + 4 * master, "optimizer_states": 4 * m}
            ),
            "You counted the master copy with the parameters. It belongs to the optimizer's "
            "states: that decides at which ZeRO stage it is sharded.",
        ),
    ),
)

# --- 01-stages: bytes per rank ------------------------------------------------------------------


def rank_bytes(parameters, ranks, stage):
    shard = -(-parameters // ranks)  # rounded up: the last rank's share is padded
    states = 12 * (shard if stage >= 1 else parameters)
    gradients = 2 * (shard if stage >= 2 else parameters)
    weights = 2 * (shard if stage >= 3 else parameters)
    return weights + gradients + states


def _rank_bytes_by_list(parameters, ranks, stage):
    shard = (parameters + ranks - 1) // ranks
    # One more line of the ledger is sharded at each stage.
    lines = [(12, 1), (2, 2), (2, 3)]
    return sum(size * (shard if stage >= first else parameters) for size, first in lines)


def _stages(sizes, divide=lambda p, n: -(-p // n)):
    """A wrong ladder: (bytes per parameter, stage from which it is sharded), and how it divides."""

    def answer(parameters, ranks, stage):
        shard = divide(parameters, ranks)
        return sum(size * (shard if stage >= at else parameters) for size, at in sizes)

    return answer


def _stage_cases(parameters: int, ranks: int) -> list[Case]:
    return [
        Case(f"{parameters:,} parameters, {ranks} ranks", (parameters, ranks, s), f"stage {s}")
        for s in range(4)
    ]


STAGES = Exercise(
    id="01-stages",
    title="Bytes per rank, stage by stage",
    task="Return the bytes of model states on the rank that holds most, for ZeRO stage 0 to 3.",
    points={"stage 0": 1, "stage 1": 1, "stage 2": 1, "stage 3": 1},
    reference=rank_bytes,
    alternatives=(_rank_bytes_by_list,),
    cases=(*_stage_cases(10, 4), *_stage_cases(7_500_000_000, 64)),
    fresh=lambda rng: [
        case
        for _ in range(2)
        for case in _stage_cases(rng.randrange(10**6, 10**9) * 2 + 1, 2 * rng.randrange(2, 200))
    ],
    library=(ledger.model_states,),
    nudge="Stage 1 shards the 12, stage 2 the gradients' 2 as well, stage 3 the parameters' 2 too.",
    misconceptions=(
        Misconception(
            "one stage late",
            _stages([(12, 2), (2, 3), (2, 4)]),
            "You shard each line one stage too late: stage 1 already shards the optimizer states.",
            "Is it > where it should be >=?",
        ),
        Misconception(
            "padded once instead of per line",
            lambda p, n, s: _stages([(12, 1), (2, 2), (2, 3)], divide=lambda a, b: a / b)(p, n, s),
            "Your shard is not a whole number of parameters. Round parameters / ranks up first, "
            "then multiply by the bytes.",
        ),
        Misconception(
            "everything sharded from stage 1",
            _stages([(16, 1)]),
            "You shard everything from stage 1 on. Stage 1 shards the optimizer states alone; "
            "gradients follow at stage 2, parameters at stage 3.",
        ),
        Misconception(
            "parameters first",
            _stages([(2, 1), (2, 2), (12, 3)]),
            "Your ladder is upside down: stage 1 shards the optimizer states, the largest line "
            "and the cheapest to shard; parameters come last.",
        ),
        Misconception(
            "gradients at stage 1",
            _stages([(12, 2), (2, 1), (2, 3)]),
            "You shard the gradients at stage 1 and the optimizer states at stage 2: it is the "
            "other way round.",
        ),
        Misconception(
            "parameters never sharded",
            _stages([(12, 1), (2, 2), (2, 4)]),
            "At stage 3 the parameters are sharded too: nothing stays whole, 16 bytes over N.",
        ),
        Misconception(
            "padding dropped",
            _stages([(12, 1), (2, 2), (2, 3)], divide=lambda p, n: p // n),
            "You rounded the shard down: the ranks' shards then do not hold the whole model. The "
            "rank that holds most has the rounded-up share.",
            "-(-a // b) rounds up without floats.",
        ),
        Misconception(
            "no master copy",
            _stages([(8, 1), (2, 2), (2, 3)]),
            "You count 8 bytes of optimizer states. With 16-bit parameters the optimizer keeps a "
            "master copy too: 4 + 4 + 4 = 12.",
        ),
        Misconception(
            "never sharded",
            _stages([(16, 4)]),
            "Your answer is the same at every stage: nothing is sharded.",
        ),
    ),
)

# --- 01-largest: the largest model --------------------------------------------------------------


def largest_model(gib, ranks, stage):
    memory = gib * 2**30
    whole = (16, 4, 2, 0)[stage]  # bytes per parameter held by every rank
    sharded = 16 - whole
    return memory * ranks // (whole * ranks + sharded)


def _largest_by_fraction(gib, ranks, stage):
    from fractions import Fraction

    per_parameter = sum(
        Fraction(size, ranks if stage >= first else 1) for size, first in ((12, 1), (2, 2), (2, 3))
    )
    return int(gib * 2**30 / per_parameter)


def _largest(whole=(16, 4, 2, 0), total=16, unit=2**30):
    def answer(gib, ranks, stage):
        kept = whole[stage]
        return gib * unit * ranks // (kept * ranks + total - kept)

    return answer


def _largest_case(gib: int, ranks: int, stage: int) -> Case:
    name = f"{gib} GiB, {ranks} rank{'s' if ranks > 1 else ''}, stage {stage}"
    return Case(name, (gib, ranks, stage))


LARGEST = Exercise(
    id="01-largest",
    title="The largest model that fits",
    task="Return the largest number of parameters whose model states fit into the GPU's memory.",
    points={"all": 3},
    reference=largest_model,
    alternatives=(_largest_by_fraction,),
    cases=(
        _largest_case(1, 1, 0),
        _largest_case(24, 1, 0),
        *(_largest_case(80, 64, stage) for stage in range(4)),
    ),
    fresh=lambda rng: [
        _largest_case(rng.randrange(8, 200), rng.randrange(3, 500), stage) for stage in range(4)
    ],
    compare=close(0.0, 1.0),  # a float's rounding may move the last parameter
    library=(ledger.model_states,),
    nudge="Bytes per parameter at this stage: what is whole, plus what is sharded over N. Divide.",
    misconceptions=(
        Misconception(
            "decimal GB",
            _largest(unit=10**9),
            "You took a GiB for 10^9 bytes; it is 2^30. At 80 GiB that is 370 million parameters.",
        ),
        Misconception(
            "weights only",
            lambda gib, ranks, stage: gib * 2**30 // 2,
            "You divided by 2 bytes: the weights alone. Training needs 16 bytes per parameter, "
            "less what is sharded away.",
        ),
        Misconception(
            "no master copy",
            _largest(whole=(12, 4, 2, 0), total=12),
            "You count 12 bytes per parameter: the fp32 master copy is missing.",
        ),
        Misconception(
            "stage ignored",
            _largest(whole=(16, 16, 16, 16)),
            "You divide by 16 at every stage: from stage 1 on, a part of the 16 is shared out over "
            "the ranks.",
        ),
        Misconception(
            "everything sharded",
            _largest(whole=(16, 0, 0, 0)),
            "You shard all 16 bytes from stage 1 on; stage 1 leaves 4 whole, stage 2 leaves 2.",
        ),
        Misconception(
            "all ranks' memory pooled",
            lambda gib, ranks, stage: gib * 2**30 * ranks // 16,
            "You pooled the memory of all ranks. That holds at stage 3 alone, where nothing is "
            "held twice.",
        ),
        Misconception(
            "a float",
            lambda gib, ranks, stage: round(largest_model(gib, ranks, stage) / 1e9, 1),
            "You return billions, rounded; return the number of parameters itself.",
        ),
    ),
)

# --- 01-zero-table: the ZeRO paper's table 1 ----------------------------------------------------


def zero_table_row(parameters, ranks):
    per_parameter = (4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    return [size * parameters / 1e9 for size in per_parameter]


def _row_by_sum(parameters, ranks):
    p, row = parameters / 1e9, []
    for whole in (4, 2, 0):
        row.append(p * whole + p * (16 - whole) / ranks)
    return row


def _row(*sizes, unit=1e9):
    def answer(parameters, ranks):
        return [(whole + sharded / ranks) * parameters / unit for whole, sharded in sizes]

    return answer


def _row_case(parameters: float, ranks: int) -> Case:
    return Case(f"{parameters / 1e9:g}B parameters on {ranks} ranks", (parameters, ranks))


ZERO_TABLE = Exercise(
    id="01-zero-table",
    title="The ZeRO paper's table 1",
    task="Return [P_os, P_os+g, P_os+g+p] in decimal GB per rank for mixed-precision Adam.",
    points={"all": 3},
    reference=zero_table_row,
    alternatives=(_row_by_sum,),
    cases=tuple(_row_case(p, n) for p in (7.5e9, 128e9, 1e12) for n in (1, 4, 64, 1024)),
    fresh=lambda rng: [_row_case(rng.randrange(1, 900) * 1e9, rng.randrange(2, 999))],
    compare=close(1e-9),
    library=(ledger.model_states,),
    nudge="4P + 12P/N, then 2P + 14P/N, then 16P/N; the paper's GB are decimal.",
    misconceptions=(
        Misconception(
            "GiB",
            _row((4, 12), (2, 14), (0, 16), unit=2**30),
            "You give GiB. The paper's table is in decimal GB, 10^9 bytes.",
        ),
        Misconception(
            "no master copy",
            _row((4, 8), (2, 10), (0, 12)),
            "You take 8 bytes for Adam. The paper's K is 12: the fp32 master copy counts too.",
        ),
        Misconception(
            "everything sharded at every stage",
            _row((0, 16), (0, 16), (0, 16)),
            "Your three columns are alike: the first two keep 4 and 2 bytes per parameter whole.",
        ),
        Misconception(
            "columns reversed",
            _row((0, 16), (2, 14), (4, 12)),
            "Your columns are in the opposite order: P_os, the least sharded, comes first.",
        ),
        Misconception(
            "parameters unsharded at the last column",
            _row((4, 12), (2, 14), (2, 14)),
            "Your last column leaves the parameters whole; in P_os+g+p they are sharded too.",
        ),
        Misconception(
            "bytes",
            _row((4, 12), (2, 14), (0, 16), unit=1),
            "You give bytes; the table is in GB.",
        ),
        Misconception(
            "whole cluster",
            lambda p, n: [x * n for x in zero_table_row(p, n)],
            "You give the bytes of all ranks together; the table is per device.",
        ),
    ),
)

EXERCISES = (BLOCK, MODEL, RECIPE, STAGES, LARGEST, ZERO_TABLE)
