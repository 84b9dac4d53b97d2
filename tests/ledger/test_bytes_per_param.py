"""Bytes per parameter, with the formulas of reference/bytes_per_param.csv read, not retyped."""

import re
from fractions import Fraction
from pathlib import Path

import pytest

from course_lib.ledger import model_states
from course_lib.specs import ModelSpec, Recipe, Strategy, tables

TABLE = Path(__file__).parents[1] / "reference" / "bytes_per_param.csv"
MEANING = {  # Megatron-LM's distributed optimizer shards what ZeRO's stage 1 does
    "fp16 params + fp16 grads (Megatron)": [("megatron-fp16", "zero1")],
    "bf16 params + fp32 grads (Megatron)": [("megatron-bf16", "zero1")],
    "fp32 params + fp32 grads (Megatron)": [("megatron-fp32", "zero1"), ("fp32", "zero1")],
    **{
        f"fp16/bf16 mixed Adam (ZeRO paper) stage {stage}": [
            ("zero-fp16", f"zero{stage}"),
            ("zero-bf16", f"zero{stage}"),
        ]
        for stage in (1, 2, 3)
    },
}


def rows():
    for row in tables.rows(TABLE):
        for precision, strategy in MEANING[row["recipe"]]:
            yield precision, strategy, int(row["unsharded"]), row["distributed_optimizer"]


def formula(text: str, ranks: int) -> Fraction:
    """'4+12/d' or '16/d'."""
    whole, sharded = re.fullmatch(r"(?:(\d+)\+)?(\d+)/d", text).groups()
    return int(whole or 0) + Fraction(int(sharded), ranks)


@pytest.mark.parametrize("precision, strategy, unsharded, sharded", list(rows()))
@pytest.mark.parametrize("ranks", [1, 2, 6, 64, 1000])
def test_bytes_per_parameter(precision, strategy, unsharded, sharded, ranks):
    count = 6 * 64 * 1000
    bare = ModelSpec("a count that all these ranks divide", "bare", count=count)
    recipe = Recipe(precision)
    assert recipe.bytes_per_parameter == unsharded
    assert model_states(bare, recipe, Strategy("ddp", ranks)).total == unsharded * count
    ledger = model_states(bare, recipe, Strategy(strategy, ranks))
    assert Fraction(ledger.total, count) == formula(sharded, ranks)
