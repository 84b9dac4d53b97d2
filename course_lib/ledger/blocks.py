"""The blocks of the presets' models, as a Program runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from course_lib.ledger import operators as op
from course_lib.ledger.tape import Tensor

if TYPE_CHECKING:
    from course_lib.ledger.programs import Program


def llama_block(run: Program, name: str, x: Tensor) -> Tensor:
    """Llama, Mistral, Qwen2, Qwen3, Mixtral: two norms, two sums."""
    attention = run.norm(f"{name}.input_layernorm", x)
    x = op.add(run.tape, x, run.module(f"{name}.self_attn", _attention(run, name), attention))
    del attention
    mlp = run.norm(f"{name}.post_attention_layernorm", x)
    return op.add(run.tape, x, _mlp(run, name, mlp))


def gemma2_block(run: Program, name: str, x: Tensor) -> Tensor:
    """A norm before and after each."""
    attention = run.norm(f"{name}.input_layernorm", x)
    attention = run.module(f"{name}.self_attn", _attention(run, name), attention)
    x = op.add(run.tape, x, run.norm(f"{name}.post_attention_layernorm", attention))
    del attention
    mlp = _mlp(run, name, run.norm(f"{name}.pre_feedforward_layernorm", x))
    return op.add(run.tape, x, run.norm(f"{name}.post_feedforward_layernorm", mlp))


def gpt2_block(run: Program, name: str, x: Tensor) -> Tensor:
    """q, k and v in one; GELU; dropout before each sum."""
    out = _fused_attention(run, f"{name}.attn.c_attn", run.norm(f"{name}.ln_1", x))
    out = run.linear(f"{name}.attn.c_proj", out, run.spec.hidden_size)
    x = op.add(run.tape, x, run.dropped(out))
    del out
    out = _two_linears(run, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", run.norm(f"{name}.ln_2", x))
    return op.add(run.tape, x, run.dropped(out))


def gpt_neox_block(run: Program, name: str, x: Tensor) -> Tensor:
    """Attention and MLP side by side, each with its norm."""
    own = f"{name}.attention"
    out = _fused_attention(run, f"{own}.query_key_value", run.norm(f"{name}.input_layernorm", x))
    attention = run.dropped(run.linear(f"{own}.dense", out, run.spec.hidden_size))
    del out
    names = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
    mlp = _two_linears(run, *names, run.norm(f"{name}.post_attention_layernorm", x))
    return op.add(run.tape, op.add(run.tape, run.dropped(mlp), attention), x)


def phi_block(run: Program, name: str, x: Tensor) -> Tensor:
    """Attention and MLP side by side, from one norm."""
    normal = run.norm(f"{name}.input_layernorm", x)
    attention = run.dropped(_attention(run, name, "dense")(normal))
    mlp = run.dropped(_two_linears(run, f"{name}.mlp.fc1", f"{name}.mlp.fc2", normal))
    return op.add(run.tape, op.add(run.tape, attention, mlp), x)


BLOCKS = {
    "gemma2": gemma2_block,
    "gpt2": gpt2_block,
    "gpt_neox": gpt_neox_block,
    "phi": phi_block,
}


def _attention(run: Program, name: str, output: str = "o_proj") -> Callable[[Tensor], Tensor]:
    """Grouped-query attention with rotary positions."""
    spec, own = run.spec, f"{name}.self_attn"
    positions = run.seq * spec.head_dim // 2

    def heads(which: str, x: Tensor, count: int) -> Tensor:
        features = count * spec.head_dim // run.ranks
        x = run.linear(f"{own}.{which}_proj", x, features, run.tokens)
        if run.has(f"{own}.{which}_norm.weight"):
            x = run.norm(f"{own}.{which}_norm", x)
        return run.ordered(x, forward=False, backward=which != "v")

    def forward(x: Tensor) -> Tensor:
        q = heads("q", x, spec.num_heads)
        k, v = (heads(which, x, spec.num_kv_heads) for which in "kv")
        out = run.attend(op.rotary(run.tape, q, positions), op.rotary(run.tape, k, positions), v)
        out = run.ordered(out, forward=True, backward=False)
        return run.linear(f"{own}.{output}", out, spec.hidden_size)

    return forward


def _fused_attention(run: Program, name: str, x: Tensor) -> Tensor:
    """q, k and v out of one linear layer, of which they are views."""
    features = 3 * run.spec.num_heads * run.spec.head_dim // run.ranks
    together = run.linear(name, x, features, run.tokens)
    q, k, v = op.split(run.tape, together, 3)
    return run.attend(q, k, v)


def _two_linears(run: Program, first: str, second: str, x: Tensor) -> Tensor:
    """To the inner size, GELU, and back."""
    inner = run.linear(first, x, run.spec.intermediate_size // run.ranks, run.tokens)
    return run.linear(second, op.activation(run.tape, inner), run.spec.hidden_size)


def _mlp(run: Program, name: str, x: Tensor) -> Tensor:
    if run.spec.num_experts:
        return run.module(f"{name}.block_sparse_moe", _experts(run, name), x)
    gate, up, down = (f"{name}.mlp.{which}_proj" for which in ("gate", "up", "down"))
    return run.module(f"{name}.mlp", _swiglu(run, gate, up, down, run.tokens), x)


def _swiglu(run: Program, gate: str, up: str, down: str, rows: int):
    inner, hidden = run.spec.intermediate_size // run.ranks, run.spec.hidden_size

    def forward(x: Tensor) -> Tensor:
        if run.execution.activation == "fused":
            gated = run.linear(gate, x, inner, rows)
            product = op.multiply(run.tape, gated, run.linear(up, x, inner, rows))
        else:
            gated = op.activation(run.tape, run.linear(gate, x, inner, rows))
            product = op.multiply(run.tape, gated, run.linear(up, x, inner, rows))
        return run.linear(down, product, hidden, rows if run.spec.num_experts else 0)

    return forward


def _experts(run: Program, name: str) -> Callable[[Tensor], Tensor]:
    """Each token goes to a few experts: here to all of them equally often."""
    spec, own = run.spec, f"{name}.block_sparse_moe"
    rows = -(-run.tokens * spec.experts_per_token // spec.num_experts)
    numel = rows * spec.hidden_size

    def forward(x: Tensor) -> Tensor:
        routes = op.softmax(run.tape, run.linear(f"{own}.gate", x, spec.num_experts))
        outs = []
        for expert in range(spec.num_experts):
            w1, w3, w2 = (f"{own}.experts.{expert}.{w}" for w in ("w1", "w3", "w2"))
            chosen = op.picked(run.tape, x, numel)
            out = _swiglu(run, w1, w3, w2, rows)(chosen)
            outs.append(op.multiply(run.tape, out, op.picked(run.tape, routes, rows)))
            del chosen, out
        return op.summed(run.tape, outs, x.numel)

    return forward
