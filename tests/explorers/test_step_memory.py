"""The step's memory explorer without a browser: its numbers, phases, words, and controls."""

import re
import sys
from dataclasses import replace
from html import unescape

import pytest

from course_lib import explorers, ledger, specs
from course_lib.errors import CourseError
from course_lib.figures.image import new_figure
from course_lib.specs import Recipe, Strategy

step_memory = sys.modules["course_lib.explorers.step_memory"]  # explorers.step_memory is a function
JOB = dict(
    model="gpt2",
    micro_batch=4,
    seq_len=1024,
    checkpointing="none",
    vocabulary=0,
    strategy="fsdp",
    gpus=8,
    precision="fsdp-bf16",
    gpu="h100-sxm-80",
)


@pytest.mark.parametrize("strategy", step_memory.STAGES)
def test_the_numbers_are_the_ledgers_and_no_moment_is_lost(strategy):
    job = JOB | {"strategy": strategy, "precision": "pure-bf16"}
    result = step_memory.compute(**job)
    recipe = Recipe("pure-bf16", micro_batch=4, seq_len=1024)
    predicted = ledger.peak(specs.model("gpt2"), recipe, Strategy(strategy, 8))
    assert (result.peak.bytes, result.peak.at) == (predicted.bytes, predicted.at)
    assert result.peak.by_category == predicted.by_category
    assert sum(result.peak.by_category.values()) == result.peak.bytes
    assert result.margin == 80 * 2**30 - predicted.bytes
    assert [name for name, _ in result.phases] == ["forward", "loss", "backward", "step"]
    moments = ledger.timeline(specs.model("gpt2"), recipe, Strategy(strategy, 8))
    assert [moment for _, those in result.phases for moment in those] == moments
    assert result.peak in dict(result.phases)[result.phase]


@pytest.mark.parametrize("strategy", step_memory.STAGES)
def test_each_moment_is_in_its_phase(strategy):
    job = JOB | {"strategy": strategy, "precision": "pure-bf16"}
    phases = dict(step_memory.compute(**job).phases)
    kinds = {
        name: {moment.at.partition(" ")[0] for moment in those} for name, those in phases.items()
    }
    assert {"enter", "leave"} <= kinds["forward"]
    assert not kinds["forward"] & {"reach", "gradient"}
    assert {"loss", "reach"} <= kinds["loss"] and not kinds["loss"] & {"enter", "leave"}
    assert {"gradient", "end"} <= kinds["backward"] and "update" not in kinds["backward"]
    assert kinds["step"] <= set(step_memory.UPDATES) and "update" in kinds["step"]
    logits = {
        name: max(x.by_category.get("logits", 0) for x in those) for name, those in phases.items()
    }
    assert max(logits, key=logits.get) == "loss" and not logits["step"]


def test_a_vocabulary_is_the_models_own_or_the_one_given():
    own = step_memory.compute(**JOB)
    assert step_memory.compute(**JOB | {"vocabulary": 50_257}).peak == own.peak
    wide = replace(specs.model("gpt2"), vocab_size=2**17)
    recipe = Recipe("fsdp-bf16", micro_batch=4, seq_len=1024)
    given = step_memory.compute(**JOB | {"vocabulary": 2**17})
    assert given.peak == ledger.peak(wide, recipe, Strategy("fsdp", 8))
    grown = given.peak.by_category["logits"] / own.peak.by_category["logits"]
    assert grown == pytest.approx(2**17 / 50_257, rel=1e-3)


@pytest.mark.parametrize(
    ("at", "phase", "told"),
    [
        ("reach lm_head", "loss", "in the loss's backward"),
        ("gradient lm_head.weight", "loss", "in the loss's backward"),
        ("loss", "loss", "in the loss"),
        ("enter", "forward", "in forward, before the model"),
        ("leave model.layers.3", "forward", "in forward of layer 3"),
        ("gradient model.layers.31.mlp.up_proj.weight", "backward", "in backward of layer 31"),
        ("gradient model.norm.weight", "backward", "in backward of model.norm"),
        ("reach model.layers.4", "backward", "in backward, before layer 4"),
        ("wait for a reduce_scatter", "backward", "in backward, as a reduce_scatter is awaited"),
        ("update", "step", "in the optimizer's step"),
        ("all_gather", "step", "in the step's all_gather"),
        ("what nobody foresaw", "forward", "in forward, what nobody foresaw"),
    ],
)
def test_a_moment_in_words(at, phase, told):
    assert step_memory.where(at, phase, "model.layers") == told


def test_every_event_of_every_stage_has_words():
    """None is told as the library names it."""
    known = {"enter", "leave", "loss", "reach", "through", "gradient", "end", *step_memory.UPDATES}
    for strategy in step_memory.STAGES:
        job = JOB | {"strategy": strategy, "precision": "zero-fp16"}
        for _, moments in step_memory.compute(**job).phases:
            ats = {x.at for x in moments if x.at.partition(" ")[0] not in known}
            assert ats <= set(step_memory.BETWEEN)


def told(**job):
    alt, page = step_memory.words(step_memory.compute(**JOB | job))
    html = unescape(page)
    sentence = html.split("</strong>")[0].removeprefix("<p><strong>")
    assert sentence in alt
    return sentence, html


def test_the_sentence_says_whether_it_fits_by_what_and_what_the_peak_is_made_of():
    sentence, html = told()
    peak = step_memory.compute(**JOB).peak
    spare = ledger.gib(80 * 2**30 - peak.bytes)
    assert sentence.startswith(
        f"The peak, {ledger.gib(peak.bytes)}, fits h100-sxm-80, {spare} to spare. It comes in the "
        "loss's backward, and is made of logits "
    )
    too_much, _ = told(micro_batch=64, seq_len=2048)
    assert "does not fit h100-sxm-80, " in too_much and " GiB too much. It comes" in too_much


def test_the_table_has_the_peak_to_the_byte_the_largest_part_first():
    _, html = told()
    numbers = re.findall(r"<td>([\d,]+)</td><td>[\d.]+%</td>", html)
    *parts, together = [int(number.replace(",", "")) for number in numbers]
    peak = step_memory.compute(**JOB).peak
    assert parts == sorted(peak.by_category.values(), reverse=True)
    assert sum(parts) == together == peak.bytes
    assert "100.0%" in html and "CUDA context" in html


def test_the_picture_names_the_peak_the_gpu_and_the_phases():
    figure = new_figure()
    update = step_memory.draw(figure.add_subplot())
    for micro_batch in (4, 128):  # an update moves what is there
        result = step_memory.compute(**JOB | {"micro_batch": micro_batch})
        update(result)
        texts = {text.get_text() for axes in figure.axes for text in axes.texts}
        assert f"{ledger.gib(result.peak.bytes, digits=1)} in the loss's backward" in texts
        assert any(text.startswith("h100-sxm-80: 80 GiB") for text in texts)
        phases = [text.split("\n")[0] for text in texts if "\n" in text]
        assert sorted(phases) == ["backward", "forward", "loss", "step"]


@pytest.fixture(scope="module")
def made():
    return explorers.step_memory("gpt2", micro_batch=4, seq_len=1024)


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("micro_batch", 8),
        ("seq_len", 2048),
        ("checkpointing", "full"),
        ("vocabulary", 8192),
        ("strategy", "ddp"),
        ("gpus", 64),
        ("model", "lab-25m"),
        ("precision", "fp32"),
        ("gpu", "a100-sxm-40"),
    ],
)
def test_moving_a_control_changes_picture_and_words(made, control, value):
    before = made.controls[control].value
    picture, words = made.html.split("</figure>")
    made.controls[control].value = value
    moved = made.html.split("</figure>")
    assert moved[0] != picture and moved[1] != words
    made.controls[control].value = before
    assert made.html == f"{picture}</figure>{words}"


def test_a_job_that_cannot_be_is_a_sentence_and_a_defect_is_not_swallowed(made, monkeypatch):
    with pytest.raises(CourseError, match="bare count"):
        step_memory.compute(**JOB | {"model": "paper-7.5b", "vocabulary": 8192})
    made.controls["strategy"].value = "hsdp"
    made.controls["gpus"].value = 4
    assert "do not fill nodes of 8" in made.html and "<table>" not in made.html
    made.controls["strategy"].value = "fsdp"
    assert "<table>" in made.html
    with monkeypatch.context() as patched:
        patched.setattr(made, "_compute", lambda **values: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.controls["gpus"].value = 8
    made.controls["gpus"].value = 16
    made.controls["gpus"].value = 8


def test_it_starts_anywhere_and_the_stored_output_reads_without_a_kernel():
    made = explorers.step_memory("gpt2", "zero2", 12, seq_len=1000, precision="zero-bf16")
    assert (made.controls["gpus"].value, made.controls["seq_len"].value) == (12, 1000)
    bundle = made._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    page = unescape(bundle["text/html"])
    assert "micro_batch 1 · seq_len 1,000" in page and "vocabulary the model's ·" in page
    assert "strategy zero2 · gpus 12 · model gpt2" in page
    assert 'alt="Stacked areas of the bytes' in page and "<table>" in page
