"""The memory ledger explorer without a browser: numbers, words, errors, what stays stored."""

import pytest

from course_lib import explorers
from course_lib.errors import CourseError
from course_lib.explorers import memory

JOB = dict(model="paper-7.5b", precision="zero-fp16", optimizer="adamw", gpu="h100-sxm-80")


def test_the_numbers_are_the_ledgers():
    result = memory.compute(**JOB, stage="zero3", ranks=64)
    assert {name: x.total for name, x in result.ledgers.items()} == {
        "ddp": 120_000_000_000,
        "zero1": 31_406_250_000,
        "zero2": 16_640_625_000,
        "zero3": 1_875_000_000,
    }
    assert result.margin == 80 * 2**30 - 1_875_000_000


@pytest.mark.parametrize(("stage", "verdict"), [("ddp", "does not fit"), ("zero3", "fits")])
def test_the_words_say_whether_the_chosen_stage_fits(stage, verdict):
    alt, table = memory.words(memory.compute(**JOB, stage=stage, ranks=64))
    assert verdict in table and f"<strong>{stage}</strong> (chosen)" in table
    assert "zero3 1.75 GiB" in alt and "80 GiB" in alt


def test_a_stage_with_nothing_to_shard_is_left_out_unless_it_is_chosen():
    job = JOB | {"precision": "fp32", "optimizer": "sgd"}
    assert set(memory.compute(**job, stage="ddp", ranks=8).ledgers) == {"ddp", "zero2", "zero3"}
    with pytest.raises(CourseError, match="nothing to shard"):
        memory.compute(**job, stage="zero1", ranks=8)


def test_moving_a_control_changes_picture_and_table():
    explorer = explorers.memory_ledger(ranks=8)
    before = explorer.html
    explorer.controls["ranks"].value = 64
    assert explorer.html != before and "<table>" in explorer.html and "<img" in explorer.html


def test_an_impossible_job_shows_its_sentence_and_recovers():
    explorer = explorers.memory_ledger(precision="fp32", optimizer="sgd")
    explorer.controls["stage"].value = "zero1"
    assert "nothing to shard" in explorer.html
    explorer.controls["stage"].value = "zero2"
    assert "<table>" in explorer.html


def test_a_defect_is_not_swallowed(monkeypatch):
    explorer = explorers.memory_ledger()
    monkeypatch.setattr(explorer, "_compute", lambda **values: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        explorer.controls["ranks"].value = 64


def test_the_stored_output_reads_without_a_kernel():
    bundle = explorers.memory_ledger(ranks=16)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "ranks 16" in bundle["text/html"] and "<table>" in bundle["text/html"]
