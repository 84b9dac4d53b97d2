"""One rank of many by a fake process group: what it holds is the ledger's."""

import pytest
import torch
import torch.distributed as dist

from course_lib import ledger, models
from course_lib.errors import CourseError
from course_lib.measure import model_state_bytes
from course_lib.measure.one_of_many import one_of_many
from course_lib.sharded.zero3 import ZeRO3
from course_lib.specs import Recipe, Strategy, read_config

SPEC = read_config(
    {
        "model_type": "llama",
        "hidden_size": 18,
        "intermediate_size": 30,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "vocab_size": 61,
    }
)


@pytest.mark.parametrize("rank", [0, 63])
def test_a_rank_of_64_holds_what_the_ledger_says(rank):
    with one_of_many(64, rank):
        model = models.build(SPEC, dtype=torch.bfloat16)
        zero = ZeRO3(model, torch.optim.AdamW)
        zero.backward(model.loss(torch.zeros(1, 5, dtype=torch.long)))
        zero.step()
        held = model_state_bytes(model, zero)
    predicted = ledger.model_states(SPEC, Recipe("zero-bf16"), Strategy("zero3", gpus=64))
    assert held == predicted.by_category()
    assert not dist.is_initialized()


def test_leaves_no_group_behind_an_error():
    with pytest.raises(KeyError), one_of_many(8):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 8)
        raise KeyError
    assert not dist.is_initialized()


def test_refuses_what_is_no_rank():
    with pytest.raises(CourseError, match="rank 8 of 8"), one_of_many(8, 8):
        pass
    with one_of_many(2), pytest.raises(CourseError, match="already"), one_of_many(8):
        pass
