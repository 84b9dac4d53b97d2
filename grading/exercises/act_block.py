"""Lesson 02, 02-block: what a Llama block leaves to backward, each tensor once."""

from course_lib import ledger
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line
from course_lib.ledger import work as library

PARTS = {"attention": 2, "mlp": 2}
LLAMA3 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def block(config, tokens, itemsize):
    h, i = config["hidden_size"], config["intermediate_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = h + h + (h + kv + kv + h)  # input, normalized; q, k, v and the output
    mlp = h + h + (i + i + i + i)  # input, normalized; gate, silu(gate), up, product
    return {"attention": attention * tokens * itemsize, "mlp": mlp * tokens * itemsize}


def _by_tensor(config, tokens, itemsize):
    h = config["hidden_size"]
    head = h / config["num_attention_heads"]
    widths = {
        "attention": {"x": h, "norm": h, "q": h, "out": h}
        | {kv: head * config["num_key_value_heads"] for kv in "kv"},
        "mlp": {"x": h, "norm": h}
        | dict.fromkeys(("gate", "silu", "up", "product"), config["intermediate_size"]),
    }
    return {part: round(tokens * itemsize * sum(x.values())) for part, x in widths.items()}


def _block(attention=lambda h, kv, i: 4 * h + 2 * kv, mlp=lambda h, kv, i: 2 * h + 4 * i, size=1):
    """The reference with one thing wrong."""

    def answer(config, tokens, itemsize):
        h, i = config["hidden_size"], config["intermediate_size"]
        kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
        bytes_ = tokens * (itemsize if size else 1)
        return {"attention": attention(h, kv, i) * bytes_, "mlp": mlp(h, kv, i) * bytes_}

    return answer


def _with_weights(config, tokens, itemsize):
    h, i = config["hidden_size"], config["intermediate_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    right = block(config, tokens, itemsize)
    attention = right["attention"] + itemsize * (2 * h * h + 2 * h * kv)
    return {"attention": attention, "mlp": right["mlp"] + itemsize * 3 * h * i}


def _by_heads(config, tokens, itemsize):
    right = block(config, tokens, itemsize)
    width = config["num_attention_heads"] * config["num_key_value_heads"]
    attention = (4 * config["hidden_size"] + 2 * width) * tokens * itemsize
    return right | {"attention": attention}


def _cases(h: int, i: int, heads: int, kv_heads: int, tokens: int, itemsize: int) -> list[Case]:
    config = dict(zip(LLAMA3, (h, i, heads, kv_heads), strict=True))
    name = f"h {h:,}, i {i:,}, {heads} heads, {kv_heads} of k and v, {tokens:,} tokens"
    return [Case(name, (config, tokens, itemsize), part) for part in PARTS]


def _fresh(rng) -> list[Case]:
    heads = 4 * rng.randrange(2, 12)
    return _cases(64 * heads, rng.randrange(2000, 9000), heads, heads // 4, 1024, 4)


BLOCK = Exercise(
    id="02-block",
    title="What a Llama block saves",
    task="Return the bytes that a Llama block saves for backward, of attention and of the MLP.",
    points=PARTS,
    reference=block,
    alternatives=(_by_tensor,),
    cases=(
        *_cases(8, 20, 4, 2, 10, 2),
        *_cases(*LLAMA3.values(), 8192, 2),
        *_cases(450, 1210, 9, 3, 512, 4),
    ),
    fresh=_fresh,
    run=call_for_a_line,
    library=(library.work, ledger.peak),
    nudge="Write down the tensors, not the operators: a tensor that two operators save is there "
    "once. Attention: input, normalized input, q, k, v, output. MLP: input, normalized input, and "
    "four of the inner width.",
    misconceptions=(
        Misconception(
            "an input for each of q, k and v",
            _block(attention=lambda h, kv, i: 6 * h + 2 * kv),
            "You count the normalized input three times, for q, k and v. All three save the same "
            "tensor: it is there once.",
        ),
        Misconception(
            "the output twice",
            _block(attention=lambda h, kv, i: 5 * h + 2 * kv),
            "One tensor too many of width h in attention. Its output and the input of o_proj are "
            "the same tensor, and the sum after it saves nothing.",
        ),
        Misconception(
            "each input for each operator",
            _block(lambda h, kv, i: 6 * h + 2 * kv, lambda h, kv, i: 3 * h + 4 * i),
            "You count an input once for each operator that saves it. q_proj, k_proj and v_proj "
            "save one and the same tensor; so do gate_proj and up_proj.",
        ),
        Misconception(
            "each tensor for each operator",
            _block(lambda h, kv, i: 7 * h + 2 * kv, lambda h, kv, i: 3 * h + 4 * i),
            "You count an input once for each operator that saves it. q_proj, k_proj and v_proj "
            "save one and the same tensor; so do gate_proj and up_proj.",
        ),
        Misconception(
            "k and v as wide as q",
            _block(attention=lambda h, kv, i: 6 * h),
            "Your k and v are as wide as q. There are fewer heads of them: num_key_value_heads, "
            "each of h / num_attention_heads.",
        ),
        Misconception(
            "heads times heads",
            _by_heads,
            "Your k and v are heads times heads wide. Each has num_key_value_heads heads, of "
            "h / num_attention_heads elements.",
        ),
        Misconception(
            "one of k and v",
            _block(attention=lambda h, kv, i: 4 * h + kv),
            "k and v are two tensors. Attention saves both.",
        ),
        Misconception(
            "q and k before the rotation",
            _block(attention=lambda h, kv, i: 5 * h + 3 * kv),
            "You count q and k twice, before and after the rotation. Its backward turns gradients "
            "back by the same angles; what it turned is not needed.",
        ),
        Misconception(
            "no norms' inputs",
            _block(lambda h, kv, i: 3 * h + 2 * kv, lambda h, kv, i: h + 4 * i),
            "You forgot what the norms save: each its input, the residual stream, of width h.",
        ),
        Misconception(
            "one too few in attention",
            _block(attention=lambda h, kv, i: 3 * h + 2 * kv),
            "One tensor too few of width h in attention. There are four: the norm's input, its "
            "output (which q_proj, k_proj and v_proj save), q, and attention's output.",
        ),
        Misconception(
            "one too few in the MLP",
            _block(mlp=lambda h, kv, i: h + 4 * i),
            "One tensor too few of width h in the MLP. There are two: the norm's input, and its "
            "output, which gate_proj and up_proj save.",
        ),
        Misconception(
            "two too few in attention",
            _block(attention=lambda h, kv, i: 2 * h + 2 * kv),
            "Two tensors too few of width h in attention. Besides q, k and v there are the norm's "
            "input, its output, and attention's output.",
        ),
        Misconception(
            "an input each for gate and up",
            _block(mlp=lambda h, kv, i: 3 * h + 4 * i),
            "One tensor too many of width h in the MLP. gate_proj and up_proj save the same "
            "input, and the sum at the end saves nothing.",
        ),
        Misconception(
            "three of the inner width",
            _block(mlp=lambda h, kv, i: 2 * h + 3 * i),
            "Four tensors of the inner width are saved: SiLU's input, both factors of the product, "
            "and down_proj's input.",
        ),
        Misconception(
            "two of the inner width",
            _block(mlp=lambda h, kv, i: 2 * h + 2 * i),
            "You count what the linear layers make or take. SiLU saves its input, and the product "
            "both of its factors: with down_proj's input four of the inner width.",
        ),
        Misconception(
            "an MLP as GPT's",
            _block(mlp=lambda h, kv, i: 2 * h + 8 * h),
            "You took GPT's MLP, twice 4h. Llama's inner width is intermediate_size.",
        ),
        Misconception(
            "elements",
            _block(size=0),
            "You count elements. Each has `itemsize` bytes.",
        ),
        Misconception(
            "one token",
            lambda config, tokens, itemsize: block(config, 1, itemsize),
            "You count one token. Every tensor has a row for each of `tokens`.",
        ),
        Misconception(
            "weights",
            _with_weights,
            "You count weights, too. They are parameters, in the ledger already; autograd keeps a "
            "reference, not a copy.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(block(*args).values()),
            'Your function does not return a dict with the keys "attention" and "mlp".',
        ),
    ),
)
