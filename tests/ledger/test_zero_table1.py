"""All 54 cells of the ZeRO paper's table 1, to the digits in which they are printed."""

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from course_lib.ledger import model_states, zero_table1
from course_lib.specs import Recipe, Strategy, model, models

STAGES = ("zero1", "zero2", "zero3")
CELLS = [
    (row.ranks, row.parameters, stage, printed)
    for row in zero_table1()
    for stage, printed in zip(STAGES, row.cells, strict=True)
]


def preset_of(parameters: int):
    (name,) = [
        name for name in models() if model(name).is_bare and model(name).parameters == parameters
    ]
    return model(name)


def test_there_are_54_cells():
    assert len(CELLS) == 54


@pytest.mark.parametrize("ranks, parameters, stage, printed", CELLS)
def test_cell(ranks, parameters, stage, printed):
    ledger = model_states(preset_of(parameters), Recipe("zero-fp16"), Strategy(stage, gpus=ranks))
    digits = Decimal(1).scaleb(Decimal(printed).as_tuple().exponent)
    # The paper rounds the cells of its small model and cuts those of the large ones.
    rounding = ROUND_HALF_UP if parameters < 10**10 else ROUND_DOWN
    gb = Decimal(ledger.total) / 10**9
    assert str(gb.quantize(digits, rounding)) == printed


def test_the_figure_everyone_quotes():
    ledger = model_states(model("paper-7.5b"), Recipe("zero-fp16"), Strategy("zero3", gpus=64))
    assert ledger.total == 1_875_000_000
    assert (ledger.parameters, ledger.gradients) == (234_375_000, 234_375_000)
    assert ledger.optimizer_states == 1_406_250_000
