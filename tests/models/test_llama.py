"""The lab's model has exactly the spec's tensors, and computes what Hugging Face's Llama does."""

import pytest
import torch

from course_lib import models, specs

CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 101,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_those_of_the_spec(tied):
    spec = specs.read_config(CONFIG | {"tie_word_embeddings": tied})
    model = models.build(spec)
    named = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert named == {tensor.name: tuple(tensor.shape) for tensor in spec.tensors()}


def test_the_same_weights_give_hugging_faces_logits():
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False)).eval()
    ours = models.build(specs.read_config(CONFIG | {"tie_word_embeddings": False}))
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(101, (2, 17))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_the_seed_alone_decides_the_weights():
    spec = specs.read_config(CONFIG)
    first, again, other = (models.build(spec, seed=s).lm_head.weight for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_it_learns():
    model = models.build(specs.read_config(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(34).reshape(2, 17)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
