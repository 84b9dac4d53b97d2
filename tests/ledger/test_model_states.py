"""Ledgers small enough to check by hand."""

import pytest

from course_lib import specs
from course_lib.errors import CourseError
from course_lib.ledger import model_states
from course_lib.specs import Recipe, Strategy

# Tensors: embedding [5, 6], a block of q [6, 6], k and v [2, 6], o [6, 6], gate and up [7, 6],
# down [6, 7] and two norms [6], a norm [6], a head [5, 6]: 12 tensors, 300 parameters.
TINY = specs.read_config(
    {
        "model_type": "llama",
        "hidden_size": 6,
        "intermediate_size": 7,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": 5,
    },
    name="tiny",
)
FP32 = Recipe("fp32")
COUNTERS = 12 * 4


def states(recipe, *strategy, **more):
    ledger = model_states(TINY, recipe, Strategy(*strategy, **more))
    return (ledger.parameters, ledger.gradients, ledger.optimizer_states)


def test_the_tiny_model_is_what_the_comment_says():
    assert (len(TINY.tensors()), TINY.parameters) == (12, 300)


def test_ddp_keeps_everything_on_every_rank():
    assert states(FP32, "ddp", 4) == (1200, 1200, 2400 + COUNTERS)
    assert states(FP32, "ddp", 1) == states(FP32, "ddp", 64)


def test_zero1_and_zero2_cut_one_padded_buffer():
    # ceil(300 / 7) = 43, with 1 of padding; the shard is one tensor to the optimizer
    assert states(FP32, "zero1", 7) == (1200, 1200, 8 * 43 + 4)
    assert states(FP32, "zero2", 7) == (1200, 4 * 43, 8 * 43 + 4)


def test_zero3_cuts_every_tensor_by_itself():
    # 30 elements: 8 of them; 36: 9; 12: 3; 42: 11; 6: 2, on 4 ranks
    held = 8 + 9 + 3 + 3 + 9 + 11 + 11 + 11 + 2 + 2 + 2 + 8
    assert states(FP32, "zero3", 4) == (4 * held, 4 * held, 8 * held + COUNTERS)


def test_fsdp_cuts_rows_and_rank_0_holds_most():
    # 5 rows: 2 of 6; 6 rows: 2 of 6; 2 rows: 1 of 6; 7 rows: 2 of 6; down has 6 rows of 7
    held = 12 + 12 + 6 + 6 + 12 + 12 + 12 + 14 + 2 + 2 + 2 + 12
    assert states(FP32, "fsdp", 4) == (4 * held, 4 * held, 8 * held + COUNTERS)


def test_fsdp_on_more_ranks_than_rows_leaves_one_row_of_each():
    held = 6 * 8 + 7 + 3  # eight matrices with rows of 6, down with rows of 7, three norms
    assert states(FP32, "fsdp", 100)[0] == 4 * held


def test_hsdp_shards_within_the_node():
    assert states(FP32, "hsdp", 16, 4) == states(FP32, "fsdp", 4)


@pytest.mark.parametrize(
    "recipe, expected",
    [
        (Recipe("zero-fp16"), (600, 600, 3600 + COUNTERS)),
        (Recipe("megatron-bf16"), (600, 1200, 3600 + COUNTERS)),
        (Recipe("megatron-fp16"), (600, 600, 4800 + COUNTERS)),
        (Recipe("pure-bf16"), (600, 600, 1200 + COUNTERS)),
        (Recipe("amp-bf16", "adamw-bf16"), (1200, 1200, 1200 + COUNTERS)),
        (Recipe("fp32", "sgd"), (1200, 1200, 0)),
        (Recipe("zero-bf16", "sgd"), (600, 600, 1200)),
        (Recipe("fp32", "sgd-momentum"), (1200, 1200, 1200)),
    ],
    ids=lambda value: f"{value.precision} {value.optimizer}" if isinstance(value, Recipe) else "",
)
def test_recipes(recipe, expected):
    assert states(recipe, "ddp") == expected


def test_frozen_parameters_keep_neither_gradients_nor_states():
    tenth = Recipe("zero-fp16", trainable=0.1)  # 30 parameters, of 2 tensors' worth
    assert states(tenth, "ddp") == (600, 60, 12 * 30 + 2 * 4)
    assert states(tenth, "zero2", 7) == (600, 2 * 5, 12 * 5 + 4)
    # 79 elements are held on 4 ranks, and a tenth of them, rounded up, is trained
    assert states(tenth, "zero3", 4) == (2 * 79, 2 * 8, 12 * 8 + 2 * 4)
    assert states(Recipe("zero-fp16", trainable=0.0), "ddp") == (600, 0, 0)


def test_offloaded_states_are_the_hosts():
    ledger = model_states(TINY, FP32, Strategy("zero1", 4, offload="optimizer"))
    assert (ledger.parameters, ledger.gradients, ledger.optimizer_states) == (1200, 1200, 0)
    assert ledger.host == 8 * 75 + 4
    assert ledger.total == 2400


def test_lines_add_up_and_show_their_arithmetic():
    ledger = model_states(TINY, Recipe("zero-fp16"), Strategy("zero2", 7))
    assert sum(line.bytes for line in ledger.lines) == ledger.total
    assert [(line.what, line.formula, line.share) for line in ledger.lines] == [
        ("fp16 parameters", "300 × 2 B", ""),
        ("fp16 gradients", "43 × 2 B", "(300 + 1 of padding) / 7"),
        ("fp32 master copy", "43 × 4 B", "(300 + 1 of padding) / 7"),
        ("fp32 exp_avg", "43 × 4 B", "(300 + 1 of padding) / 7"),
        ("fp32 exp_avg_sq", "43 × 4 B", "(300 + 1 of padding) / 7"),
        ("step counters", "1 × 4 B", ""),
    ]


def test_it_says_how_uneven_shards_are():
    ledger = model_states(TINY, FP32, Strategy("fsdp", 4))
    assert ledger.lines[0].formula == "104 × 4 B"
    assert ledger.lines[0].share == (
        "ceil(rows / 4) rows of each of 12 tensors, 29 above an even share"
    )


def test_plain_data():
    data = model_states(TINY, FP32, Strategy("zero1", 3)).to_dict()
    assert data["bytes"] == {"parameters": 1200, "gradients": 1200, "optimizer_states": 804}
    assert (data["parameters_total"], data["host_bytes"]) == (300, 0)
    assert data["lines"][0] == {
        "category": "parameters",
        "what": "fp32 parameters",
        "bytes": 1200,
        "formula": "300 × 4 B",
        "share": "",
        "host": False,
    }


@pytest.mark.parametrize(
    "recipe, strategy, told",
    [
        (Recipe("fp32", "sgd"), Strategy("zero1", 4), "take ddp, or zero2 to shard the gradients"),
        (Recipe(trainable=0), Strategy("zero1", 4), "a frozen model keeps no optimizer states"),
        (Recipe(trainable=0), Strategy("zero2", 4), "take ddp, or zero3"),
        (
            Recipe("amp-bf16", "sgd"),
            Strategy(offload="optimizer"),
            "no optimizer states to offload",
        ),
    ],
)
def test_stage_and_optimizer_that_do_not_go_together(recipe, strategy, told):
    with pytest.raises(CourseError, match=told):
        model_states(TINY, recipe, strategy)


def test_a_master_copy_is_something_to_shard():
    assert states(Recipe("zero-fp16", "sgd"), "zero1", 4) == (600, 600, 300)
