import json

import pytest

from course_lib import specs
from course_lib.errors import CourseError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 301,
}


def write(folder, content: str):
    path = folder / "config.json"
    path.write_text(content)
    return path


def test_a_path_a_folder_and_a_dict_give_the_same_model(tmp_path):
    path = write(tmp_path, json.dumps(LLAMA))
    assert specs.read_config(path).tensors() == specs.read_config(LLAMA).tensors()
    assert specs.read_config(str(tmp_path)) == specs.read_config(path)


def test_a_model_is_named_after_its_folder_its_file_or_its_config(tmp_path):
    assert specs.read_config(write(tmp_path, json.dumps(LLAMA))).name == tmp_path.name
    (tmp_path / "tiny.json").write_text(json.dumps(LLAMA))
    assert specs.read_config(tmp_path / "tiny.json").name == "tiny"
    assert specs.read_config(LLAMA).name == "llama"
    assert specs.read_config(LLAMA | {"_name_or_path": "org/tiny"}).name == "org/tiny"
    assert specs.read_config(LLAMA, name="mine").name == "mine"


def test_defaults_depend_on_the_model_type():
    heads = LLAMA | {"num_attention_heads": 16}
    assert specs.read_config(heads).num_kv_heads == 16
    assert specs.read_config(heads | {"model_type": "mistral"}).num_kv_heads == 8
    null = {"model_type": "mistral", "num_key_value_heads": None}
    assert specs.read_config(heads | null).num_kv_heads == 16
    assert specs.read_config(heads | {"model_type": "gemma2"}).tied_embeddings
    assert not specs.read_config(heads).tied_embeddings
    assert specs.read_config(heads | {"model_type": "gemma2"}).head_dim == 256


def test_a_bare_count_can_be_read_too():
    spec = specs.read_config({"model_type": "bare", "parameters": 1_300_000_000})
    assert (spec.parameters, spec.tensors()) == (1_300_000_000, ())


@pytest.mark.parametrize(
    "content, told",
    [
        (json.dumps(LLAMA)[:-40], "is not JSON, or only the beginning of it"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\x00\x01", "is not JSON"),
        ("[1, 2]", "has no model_type"),
        (json.dumps({"hidden_size": 4}), "has no model_type"),
        (json.dumps({"model_type": 3}), "has no model_type"),
        (json.dumps({"model_type": "bert"}), "is of model_type 'bert'"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, content, told):
    path = write(tmp_path, content)
    with pytest.raises(CourseError, match="config.json") as error:
        specs.read_config(path)
    assert told in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(CourseError, match="There is no file .*nowhere.json: give the path"):
        specs.read_config(tmp_path / "nowhere.json")
    with pytest.raises(CourseError, match="There is no file .*config.json"):
        specs.read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CourseError, match="config.json cannot be read"):
        specs.read_config(tmp_path)


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "model_type"])
def test_sizes_must_be_there(key):
    with pytest.raises(CourseError, match=f"it has no {key}"):
        specs.read_config({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize(
    "nonsense",
    [
        {"hidden_size": -48},
        {"hidden_size": "48"},
        {"hidden_size": 48.0},
        {"hidden_size": None},
        {"hidden_size": True},
        {"vocab_size": 0},
        {"vocab_size": float("nan")},
        {"vocab_size": [301]},
        {"num_hidden_layers": 10**9},
        {"head_dim": -1},
        {"num_key_value_heads": 0},
        {"tie_word_embeddings": "false"},
        {"attention_bias": 1},
        {"num_attention_heads": 7},  # does not divide the hidden size
        {"num_key_value_heads": 3},  # does not divide the heads
        {"num_key_value_heads": 16},
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
        {"model_type": "mixtral", "num_local_experts": -2},
    ],
    ids=str,
)
def test_values_that_no_model_could_have(nonsense):
    with pytest.raises(CourseError, match="The config does not describe a model, since"):
        specs.read_config(LLAMA | nonsense)


def test_gpt2_is_told_in_its_own_names():
    with pytest.raises(CourseError, match="it has no n_embd"):
        specs.read_config({"model_type": "gpt2"})
    gpt2 = {"model_type": "gpt2", "n_embd": 50, "n_head": 7, "n_layer": 2, "vocab_size": 10}
    with pytest.raises(CourseError, match="7 attention heads do not divide"):
        specs.read_config(gpt2)
