"""Read a Hugging Face config.json into a ModelSpec.

A config leaves out what its class takes for granted, and each class takes other things for granted:
Mistral has 8 key/value heads unless told otherwise, Llama as many as query heads; Gemma 2 ties its
embeddings, Llama does not. OPTIONAL holds, for each `model_type`, the keys that may be missing and
what then holds, as in the configuration classes of transformers 5. The sizes must all be there.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from course_lib.errors import CourseError
from course_lib.specs.checking import whole
from course_lib.specs.model_spec import BARE, MOST_EXPERTS, MOST_LAYERS, ModelSpec

UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
# None stands for: num_key_value_heads = num_attention_heads, head_dim = hidden_size / heads,
# n_inner = 4 · n_embd.
OPTIONAL = {
    "llama": {
        "num_key_value_heads": None,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        **UNTIED,
    },
    "mistral": {"num_key_value_heads": 8, "head_dim": None, **UNTIED},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, **UNTIED},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, **UNTIED},
    "mixtral": {
        "num_key_value_heads": 8,
        "head_dim": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **UNTIED,
    },
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "attention_bias": False, **TIED},
    "gpt2": {"n_positions": 1024, "n_inner": None, **TIED},
    "gpt_neox": {"attention_bias": True, **UNTIED},
    "phi": {"num_key_value_heads": None, "head_dim": None, "qk_layernorm": False, **UNTIED},
}
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}


def read_config(config: str | Path | Mapping, name: str | None = None) -> ModelSpec:
    """The model that a config.json describes: its path, its folder, or its contents as a dict.

    `name` is what ledgers will call it; else the config's own name, its folder's, or its type.
    Beside Hugging Face's types it knows the course's own `{"model_type": "bare", "parameters": N}`.

    Raises CourseError, naming the file, when it is missing, is not JSON, is of a `model_type` that
    the course does not know, lacks a size, or holds a value that no model could have.
    """
    if isinstance(config, Mapping):
        keys = _Keys("The config", config)
        own_name = config.get("_name_or_path") or keys.model_type
    else:
        path = Path(config)
        path = path / "config.json" if os.path.isdir(path) else path
        keys = _Keys(str(path), _load(path))
        own_name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _spec(keys, str(name or own_name))


def _load(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        reason = f"There is no file {path}: give the path of a config.json."
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}): give the path of a config.json."
    except (ValueError, RecursionError):
        reason = f"{path} is not JSON, or only the beginning of it: download it again."
    raise CourseError(reason)


def _spec(keys: "_Keys", name: str) -> ModelSpec:
    family = keys.model_type
    if family == BARE:
        return ModelSpec(name, BARE, count=keys.size("parameters", most=10**15))
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.optional_size("num_key_value_heads", otherwise=heads)
    if heads % kv_heads:
        keys.refuse(f"{kv_heads} key/value heads do not divide {heads} attention heads")
    head_dim = keys.optional_size("head_dim", otherwise=0)
    if not head_dim and hidden % heads:
        keys.refuse(f"{heads} attention heads do not divide a hidden size of {hidden}")
    if family == "gpt2":
        inner = keys.optional_size("n_inner", otherwise=4 * hidden)
    else:
        inner = keys.size("intermediate_size")
    experts = keys.optional_size("num_local_experts", otherwise=0, most=MOST_EXPERTS)
    # GPT-2 and Phi have biases throughout, GPT-NeoX in its MLP, Qwen2 on q, k and v.
    throughout = family in ("gpt2", "phi")
    attention_bias = throughout or keys.flag("attention_bias")
    return ModelSpec(
        name=name,
        family=family,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        num_layers=keys.size("num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=inner,
        tied_embeddings=keys.flag("tie_word_embeddings"),
        max_positions=keys.optional_size("n_positions", otherwise=0),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=throughout or family == "gpt_neox" or keys.flag("mlp_bias"),
        qk_norm=family == "qwen3" or keys.flag("qk_layernorm"),
        num_experts=experts,
        experts_per_token=keys.optional_size("num_experts_per_tok", otherwise=0, most=experts),
    )


class _Keys:
    """A config's keys, each checked as it is read; errors name the file and the key."""

    def __init__(self, source: str, config: object):
        self.source = source
        if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
            self.refuse("it has no model_type, such as 'llama'")
        self.config, self.model_type = config, config["model_type"]
        if self.model_type not in (*OPTIONAL, BARE):
            raise CourseError(
                f"{source} is of model_type {self.model_type!r}, which the course cannot count: "
                f"take a model of one of the types {', '.join(OPTIONAL)}."
            )
        self.optional = OPTIONAL.get(self.model_type, {})

    def refuse(self, reason: str) -> NoReturn:
        raise CourseError(
            f"{self.source} does not describe a model, since {reason}: "
            "take the config.json that was published with the weights."
        )

    def size(self, key: str, most: int = 10**9) -> int:
        """A size that must be there: a whole number from 1 to `most`."""
        key = GPT2_KEYS.get(key, key) if self.model_type == "gpt2" else key
        if key not in self.config:
            self.refuse(f"it has no {key}")
        return self._whole(key, self.config[key], most)

    def optional_size(self, key: str, otherwise: int, most: int = 10**9) -> int:
        """A size that this model_type may leave out; `otherwise` where it is null or unknown."""
        value = self.config.get(key, self.optional[key]) if key in self.optional else None
        return otherwise if value is None else self._whole(key, value, most)

    def flag(self, key: str) -> bool:
        """True or false; false where this model_type has no such key."""
        if key not in self.optional:
            return False
        value = self.config.get(key)
        value = self.optional[key] if value is None else value
        if not isinstance(value, bool):
            self.refuse(f"its {key} is {value!r} instead of true or false")
        return value

    def _whole(self, key: str, value: object, most: int) -> int:
        try:
            whole(key, value, most=most)
        except CourseError:
            self.refuse(f"its {key} is {value!r} instead of a whole number from 1 to {most:,}")
        return value
