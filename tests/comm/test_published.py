"""Every row of the table of published volumes, in the limit of many ranks."""

import re

import pytest

from course_lib import comm
from course_lib.comm import published
from course_lib.errors import CourseError

GPUS = 2**14
PARAMETERS = 1000 * 2 * GPUS  # which ranks divide, as two 4-bit numbers to a byte as well
ROWS = published.volumes()


def printed_multiple(row):
    """'0.75P' is 0.75; so is '0.75P per micro-batch'."""
    return float(re.fullmatch(r"([\d.]+)P( per micro-batch)?", row.elements)[1])


def test_there_are_the_seven_rows_and_the_one_in_a_note():
    assert len(ROWS) == 8
    assert "3P" in ROWS[-1].note


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.strategy)
def test_row(row):
    computed = published.multiple(row.strategy, PARAMETERS, GPUS)
    assert computed == pytest.approx(printed_multiple(row), rel=1e-4)
    if "zero++" not in row.strategy:  # whose backward is no 1/N away
        assert computed == pytest.approx(printed_multiple(row) * (GPUS - 1) / GPUS, rel=1e-4)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.strategy)
def test_what_four_micro_batches_move(row):
    """Per micro-batch where parameters are sharded and freed; the gradients alone under zero2."""
    four = published.multiple(row.strategy, PARAMETERS, GPUS, grad_accum=4)
    once = ("ddp", "zero1", published.ALL_REDUCING)
    expected = {name: printed_multiple(row) for name in once} | {"zero2": 4 + 1}
    assert four == pytest.approx(expected.get(row.strategy, 4 * printed_multiple(row)), rel=1e-4)


def test_zero_plus_plus_line_by_line():
    """In units of P: 0.5 across nodes, 7/8 within, 0.25 across."""
    plan = published.plan("zero++ cross-node", PARAMETERS, GPUS)
    multiples = [line.bytes_per_rank / (2 * PARAMETERS) for line in plan.lines]
    assert multiples == pytest.approx([0.5, 7 / 8, 0.25], rel=1e-3)


def test_a_plan_of_others_draws_itself_too():
    assert "4-bit gradients" in repr(published.plan("zero++ cross-node", 10**9, 64))
    assert isinstance(published.plan("zero3", 10**9, 64), comm.Plan)


def test_strategies_are_known_by_name():
    with pytest.raises(CourseError, match="no published strategy called 'zero4'"):
        published.plan("zero4", 10**9, 64)
