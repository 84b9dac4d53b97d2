import pytest

from course_lib import specs

# Totals as published with the weights, or in transformers' own model tables.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-14b": 14_768_307_200,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma2-9b": 9_241_705_984,
    "gpt-neox-20b": 20_554_567_680,
    "phi-2": 2_779_683_840,
    "paper-7.5b": 7_500_000_000,
    "paper-128b": 128_000_000_000,
    "paper-1t": 1_000_000_000_000,
}


@pytest.mark.parametrize("name, parameters", PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name, parameters):
    assert specs.model(name).parameters == parameters


def test_every_preset_has_a_known_total():
    assert set(specs.models()) == {*PUBLISHED, "lab-25m"}


def test_a_dense_model_is_all_active():
    assert specs.model("llama3-8b").active_parameters == 8_030_261_248


def test_mixtral_sends_a_token_through_two_of_eight_experts():
    mixtral = specs.model("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    assert mixtral.parameters - mixtral.active_parameters == 32 * 6 * expert
    assert mixtral.active_parameters == 12_879_925_248  # "12.9B", arXiv 2401.04088


def test_a_bare_count_has_no_tensors():
    paper = specs.model("paper-7.5b")
    assert paper.is_bare
    assert paper.tensors() == ()
    assert paper.block() == ()
    assert paper.active_parameters == 7_500_000_000


def test_the_lab_model_shows_padding():
    lab = specs.model("lab-25m")
    assert 20_000_000 <= lab.parameters <= 30_000_000
    assert lab.parameters % 4 and lab.parameters % 8
    assert any(tensor.shape[0] % 4 for tensor in lab.tensors())
    assert lab.num_kv_heads < lab.num_heads
    assert not lab.tied_embeddings


def test_blocks_are_alike_and_carry_their_layer():
    llama = specs.model("llama2-7b")
    third = [tensor for tensor in llama.tensors() if tensor.layer == 3]
    assert [tensor.shape for tensor in third] == [tensor.shape for tensor in llama.block()]
    assert third[0].name == "model.layers.3.self_attn.q_proj.weight"
    assert {tensor.layer for tensor in llama.tensors()} == {None, *range(32)}


def test_names_are_unique():
    for name in specs.models():
        names = [tensor.name for tensor in specs.model(name).tensors()]
        assert len(names) == len(set(names))
