"""Parameter tensors against the transformers classes themselves, built on the meta device."""

import json
import math
import re

import pytest

from course_lib import specs
from course_lib.specs.presets import PRESETS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 301,
    "max_position_embeddings": 32,
}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 8, "vocab_size": 301}
TIE, UNTIE = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

# Each leaves out other keys, so that the defaults of the classes are held as well.
ODD = {
    "llama": {"model_type": "llama", **SMALL},
    "llama gqa tied": {"model_type": "llama", **SMALL, "num_key_value_heads": 2, **TIE},
    "llama biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "llama head_dim": {"model_type": "llama", **SMALL, "head_dim": 10, "num_key_value_heads": 4},
    "llama head_dim null": {"model_type": "llama", **SMALL, "head_dim": None},
    "llama kv null": {"model_type": "llama", **SMALL, "num_key_value_heads": None},
    "mistral": {"model_type": "mistral", **SMALL},
    "mistral head_dim": {"model_type": "mistral", **SMALL, "head_dim": 20, **TIE},
    "qwen2": {"model_type": "qwen2", **SMALL, "num_attention_heads": 32, "hidden_size": 64},
    "qwen2 kv null": {"model_type": "qwen2", **SMALL, "num_key_value_heads": None},
    "qwen2 tied": {"model_type": "qwen2", **SMALL, "num_key_value_heads": 4, **TIE},
    "qwen3": {"model_type": "qwen3", **SMALL, "num_attention_heads": 32},
    "qwen3 biases": {
        "model_type": "qwen3",
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        **TIE,
    },
    "mixtral": {"model_type": "mixtral", **SMALL},
    "mixtral five experts": {
        "model_type": "mixtral",
        **SMALL,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "head_dim": 4,
    },
    "gemma2": {"model_type": "gemma2", **SMALL},
    "gemma2 untied": {
        "model_type": "gemma2",
        **SMALL,
        "head_dim": 12,
        "attention_bias": True,
        **UNTIE,
    },
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt2 inner untied": {"model_type": "gpt2", **GPT2, "n_inner": 50, "n_positions": 7, **UNTIE},
    "gpt2 inner null": {"model_type": "gpt2", **GPT2, "n_inner": None},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL},
    "gpt_neox tied, no bias": {"model_type": "gpt_neox", **SMALL, "attention_bias": False, **TIE},
    "phi": {"model_type": "phi", **SMALL},
    "phi tied, qk-norm": {
        "model_type": "phi",
        **SMALL,
        "num_key_value_heads": 4,
        "qk_layernorm": True,
        **TIE,
    },
}
REAL = {
    name: preset["config"]
    for name, preset in json.loads(PRESETS.read_text()).items()
    if preset["config"]["model_type"] != "bare"
}


def named_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of transformers' class for `config`."""
    arguments = {key: value for key, value in config.items() if key != "model_type"}
    # Token ids that lie outside a small vocabulary only cause warnings.
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(config["model_type"], **arguments, **tokens)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def stacked(tensors) -> dict[str, tuple[int, ...]]:
    """As transformers 5 has them: Mixtral's experts in two tensors, gate and up in one of them."""
    shapes = {}
    for tensor in tensors:
        name = tensor.name.replace("block_sparse_moe", "mlp")
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.w([123])\.weight", name)
        if not match:
            shapes[name] = tensor.shape
        elif match[3] == "1":  # w1 is gate, w3 is up
            inner, hidden = tensor.shape
            shapes[f"{match[1]}.gate_up_proj"] = (int(match[2]) + 1, 2 * inner, hidden)
        elif match[3] == "2":
            shapes[f"{match[1]}.down_proj"] = (int(match[2]) + 1, *tensor.shape)
    return shapes


@pytest.mark.parametrize("config", [*ODD.values(), *REAL.values()], ids=[*ODD, *REAL])
def test_every_tensor_is_that_of_transformers(config):
    theirs = named_shapes(config)
    ours = specs.read_config(config)
    assert list(stacked(ours.tensors()).items()) == list(theirs.items())
    assert ours.parameters == sum(map(math.prod, theirs.values()))
