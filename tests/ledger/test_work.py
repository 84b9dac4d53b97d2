"""A program's micro-batch beside a real one's: the same events, with the same bytes alive."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from course_lib import ledger, measure, models, specs
from course_lib.ledger.work import _work, work

LAB = specs.model("lab-25m")
WIDE = replace(
    LAB,
    name="lab-wide",
    vocab_size=512,
    hidden_size=192,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=528,
)
TALL = replace(WIDE, num_layers=3, vocab_size=4096, tied_embeddings=True, num_kv_heads=6)
BATCH, SEQ = 2, 32
TOKENS = torch.arange(BATCH * (SEQ + 1)).view(BATCH, SEQ + 1)
IDS = TOKENS.nbytes  # of which the real model's are there all the time
PRECISIONS = {"fp32": torch.float32, "pure-bf16": torch.bfloat16}


def recipe(precision: str, checkpointing: str = "none") -> specs.Recipe:
    return specs.Recipe(precision, micro_batch=BATCH, seq_len=SEQ, checkpointing=checkpointing)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("spec", [WIDE, TALL], ids=["wide", "tall, tied"])
def test_events_are_those_of_the_real_model(spec, precision):
    model = models.build(spec, dtype=PRECISIONS[precision])
    real = measure.work(model, lambda: model.loss(TOKENS))
    made = work(spec, recipe(precision), ledger.CPU)
    assert [x[:2] for x in made] == [x[:2] for x in real]
    for ours, theirs in zip(made[:-1], real[:-1], strict=True):
        assert ours.now == pytest.approx(theirs.now, abs=IDS, rel=1e-3), ours
        assert ours.most == pytest.approx(theirs.most, abs=IDS, rel=2e-3), ours
        assert sum(ours.live) == ours.now
        assert sum(ours.split) == ours.most
    assert made[-1].now == 4  # the loss


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_peak_under_checkpoints_is_that_of_the_real_model(precision):
    model = models.build(WIDE, dtype=PRECISIONS[precision])
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(block)
    real = measure.work(model, lambda: model.loss(TOKENS))
    made = work(WIDE, recipe(precision, "full"), ledger.CPU)
    most = max(x.most for x in made)
    assert most == pytest.approx(max(x.most for x in real), rel=1e-3)
    assert most < max(x.most for x in work(WIDE, recipe(precision), ledger.CPU))


@pytest.mark.parametrize("checkpointing", specs.CHECKPOINTING)
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-xl", "gemma2-9b", "mixtral-8x7b"])
def test_what_is_repeated_is_what_would_run(name, checkpointing, monkeypatch):
    """Of a deep model a few blocks run, and stand for the others."""
    spec = replace(specs.model(name), num_layers=7)
    given = spec, recipe("amp-bf16", checkpointing), ledger.CUDA, {"", f"{spec.blocks}.5"}
    short = work(*given)
    monkeypatch.setattr("course_lib.ledger.work.SHALLOW", 7)
    _work.cache_clear()
    blocks = {f"{spec.blocks}.{layer}" for layer in range(7)}
    assert short == work(*given[:-1], {"", *blocks})
    _work.cache_clear()


def test_a_tensor_that_is_used_twice_is_added_up_in_place_or_not():
    """A third tensor, where a dispatch mode looks on, makes the residual stream's sums dearer."""
    small, large = (
        work(WIDE, recipe("fp32"), ledger.Execution(sums_in_place=in_place))
        for in_place in (True, False)
    )
    more = [b.most - a.most for a, b in zip(small, large, strict=True)]
    assert set(more) == {0, 4 * BATCH * SEQ * WIDE.hidden_size}


def test_the_loss_in_chunks_has_fewer_logits():
    spec = replace(WIDE, vocab_size=100_000)
    whole, chunked = (
        max(x.split[1] for x in work(spec, recipe("fp32"), ledger.Execution(loss_chunks=n)))
        for n in (1, 8)
    )
    logits = 4 * BATCH * SEQ * spec.vocab_size
    assert whole == pytest.approx(3 * logits, rel=1e-3)  # log_softmax, its gradient, the logits'
    assert chunked <= 3.01 * logits / 8
