"""Every parameter tensor of a model, architecture by architecture.

A decoder is a stem (the embeddings), `num_layers` equal blocks, and an end (the last norm and the
head). Each function below lists these three for one architecture, in the names, shapes and order
of `named_parameters()` of its class in Hugging Face transformers 5. A head tied to the embedding is
the same tensor used twice, so it is listed once, as the embedding.

Two layouts differ from the rest. GPT-2 stores linear weights as [in, out], all others as [out, in].
Mixtral's experts are listed one by one, under the names of the published checkpoint; transformers 5
keeps the same numbers stacked, as [experts, ...].

Sizes: H hidden, V vocabulary, I the MLP's inner size, D a head's; Q = heads · D, KV = kv_heads · D.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_lib.specs.model_spec import ModelSpec


@dataclass(frozen=True)
class TensorSpec:
    """One parameter tensor.

    `layer` is the index of its block, None for the stem and the end; `expert` is the index of its
    expert in a mixture of experts, None for what every token passes through.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    expert: int | None = None

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Parts:
    """A decoder's tensors: `block` stands once, with names relative to `blocks`.<layer>."""

    stem: list[TensorSpec]
    blocks: str
    block: list[TensorSpec]
    end: list[TensorSpec]


def llama(m: "ModelSpec") -> Parts:
    """Llama, Mistral, Qwen2, Qwen3: pre-norm, grouped-query attention, SwiGLU."""
    return _rms_decoder(m, _swiglu(m), ["input_layernorm", "post_attention_layernorm"])


def gemma2(m: "ModelSpec") -> Parts:
    """Gemma 2: a norm before and after both attention and MLP."""
    around = [f"{side}_feedforward_layernorm" for side in ("pre", "post")]
    return _rms_decoder(m, _swiglu(m), ["input_layernorm", "post_attention_layernorm", *around])


def mixtral(m: "ModelSpec") -> Parts:
    """Mixtral: a router [experts, H] sends each token through a few of the experts."""
    h, i = m.hidden_size, m.intermediate_size
    experts = [
        TensorSpec(f"block_sparse_moe.experts.{expert}.{name}.weight", shape, expert=expert)
        for expert in range(m.num_experts)
        for name, shape in (("w1", (i, h)), ("w2", (h, i)), ("w3", (i, h)))
    ]
    router = _linear("block_sparse_moe.gate", m.num_experts, h)
    return _rms_decoder(m, router + experts, ["input_layernorm", "post_attention_layernorm"])


def gpt2(m: "ModelSpec") -> Parts:
    """GPT-2: learned positions, fused q, k and v, biases everywhere, weights [in, out]."""
    h, i = m.hidden_size, m.intermediate_size
    table = [
        TensorSpec("transformer.wte.weight", (m.vocab_size, h)),
        TensorSpec("transformer.wpe.weight", (m.max_positions, h)),
    ]
    block = (
        _layer_norm("ln_1", h)
        + _conv1d("attn.c_attn", h, 3 * h)
        + _conv1d("attn.c_proj", h, h)
        + _layer_norm("ln_2", h)
        + _conv1d("mlp.c_fc", h, i)
        + _conv1d("mlp.c_proj", i, h)
    )
    return Parts(table, "transformer.h", block, _layer_norm("transformer.ln_f", h) + _head(m))


def gpt_neox(m: "ModelSpec") -> Parts:
    """GPT-NeoX: fused q, k and v; attention and MLP side by side; the head without a bias."""
    h, i = m.hidden_size, m.intermediate_size
    block = (
        _layer_norm("input_layernorm", h)
        + _layer_norm("post_attention_layernorm", h)
        + _linear("attention.query_key_value", 3 * h, h, m.qkv_bias)
        + _linear("attention.dense", h, h, m.output_bias)
        + _linear("mlp.dense_h_to_4h", i, h, m.mlp_bias)
        + _linear("mlp.dense_4h_to_h", h, i, m.mlp_bias)
    )
    stem = _linear("gpt_neox.embed_in", m.vocab_size, h)
    end = _layer_norm("gpt_neox.final_layer_norm", h) + _head(m)
    return Parts(stem, "gpt_neox.layers", block, end)


def phi(m: "ModelSpec") -> Parts:
    """Phi: one norm feeds attention and MLP side by side; biases everywhere, the head included."""
    h, i, d = m.hidden_size, m.intermediate_size, m.head_dim
    qk_norms = _layer_norm("self_attn.q_layernorm", d) + _layer_norm("self_attn.k_layernorm", d)
    block = (
        _attention(m, output="dense")
        + (qk_norms if m.qk_norm else [])
        + _linear("mlp.fc1", i, h, m.mlp_bias)
        + _linear("mlp.fc2", h, i, m.mlp_bias)
        + _layer_norm("input_layernorm", h)
    )
    # The weight of a tied head is the embedding; its bias is its own.
    bias = TensorSpec("lm_head.bias", (m.vocab_size,))
    end = [*_layer_norm("model.final_layernorm", h), *_head(m), bias]
    return Parts(_linear("model.embed_tokens", m.vocab_size, h), "model.layers", block, end)


ARCHITECTURES = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "mixtral": mixtral,
    "gemma2": gemma2,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "phi": phi,
}


def _rms_decoder(m: "ModelSpec", mlp: list[TensorSpec], norms: list[str]) -> Parts:
    h = m.hidden_size
    qk_norms = _rms_norm("self_attn.q_norm", m.head_dim) + _rms_norm("self_attn.k_norm", m.head_dim)
    block = _attention(m) + (qk_norms if m.qk_norm else []) + mlp
    block += [tensor for norm in norms for tensor in _rms_norm(norm, h)]
    stem = _linear("model.embed_tokens", m.vocab_size, h)
    return Parts(stem, "model.layers", block, _rms_norm("model.norm", h) + _head(m))


def _attention(m: "ModelSpec", output: str = "o_proj") -> list[TensorSpec]:
    h, q, kv = m.hidden_size, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    return (
        _linear("self_attn.q_proj", q, h, m.qkv_bias)
        + _linear("self_attn.k_proj", kv, h, m.qkv_bias)
        + _linear("self_attn.v_proj", kv, h, m.qkv_bias)
        + _linear(f"self_attn.{output}", h, q, m.output_bias)
    )


def _swiglu(m: "ModelSpec") -> list[TensorSpec]:
    h, i = m.hidden_size, m.intermediate_size
    return (
        _linear("mlp.gate_proj", i, h, m.mlp_bias)
        + _linear("mlp.up_proj", i, h, m.mlp_bias)
        + _linear("mlp.down_proj", h, i, m.mlp_bias)
    )


def _head(m: "ModelSpec") -> list[TensorSpec]:
    return [] if m.tied_embeddings else _linear("lm_head", m.vocab_size, m.hidden_size)


def _linear(name: str, out: int, into: int, bias: bool = False) -> list[TensorSpec]:
    weight = TensorSpec(f"{name}.weight", (out, into))
    return [weight, TensorSpec(f"{name}.bias", (out,))] if bias else [weight]


def _conv1d(name: str, into: int, out: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (into, out)), TensorSpec(f"{name}.bias", (out,))]


def _rms_norm(name: str, size: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (size,))]


def _layer_norm(name: str, size: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (size,)), TensorSpec(f"{name}.bias", (size,))]
