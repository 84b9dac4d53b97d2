"""What a block saves: Korthikanti et al. 2022 come out of the programs, to the byte."""

from pathlib import Path

import pytest

from course_lib import ledger, specs
from course_lib.ledger.execution import Execution
from course_lib.ledger.saved import saved as saved_by_block
from course_lib.ledger.work import work
from course_lib.specs.tables import rows

GIB = 2**30
PUBLISHED = rows(Path(ledger.__file__).parent / "data" / "activations_korthikanti.csv")
STATISTICS = 2 * 2 * 4  # bytes a token that they leave out: fp32 mean and deviation of two norms


def gpt(hidden: int, heads: int, seq: int) -> specs.ModelSpec:
    config = {"model_type": "gpt2", "n_embd": hidden, "n_head": heads, "n_layer": 3}
    return specs.read_config(config | {"n_positions": seq, "vocab_size": 64, "n_inner": 4 * hidden})


def saved(model, batch: int, seq: int, checkpointing: str = "none", **execution) -> int:
    """Bytes that the second block leaves to backward, in 16 bits, without statistics."""
    recipe = specs.Recipe("zero-fp16", micro_batch=batch, seq_len=seq, checkpointing=checkpointing)
    name = "transformer.h.1"
    given = Execution(attention="explicit", dropout=True, **execution)
    now = {(x.kind, x.name): x.now for x in work(model, recipe, given, {name})}
    shared = given.tensor_parallel if given.sequence_parallel else 1
    statistics = 0 if checkpointing == "full" else STATISTICS * batch * seq // shared
    return now["leave", name] - now["enter", name] - statistics


@pytest.mark.parametrize(("batch", "seq", "hidden", "heads"), [(1, 64, 48, 4), (3, 40, 96, 12)])
def test_bytes_per_layer_are_those_of_the_paper(batch, seq, hidden, heads):
    model, sbh = gpt(hidden, heads, seq), batch * seq * hidden
    scores = heads * seq * seq * batch
    assert saved(model, batch, seq) == 34 * sbh + 5 * scores
    assert saved(model, batch, seq, "selective") == 34 * sbh
    assert saved(model, batch, seq, "full") == 2 * sbh
    for t in (2, 4):
        assert (
            saved(model, batch, seq, tensor_parallel=t)
            == (10 * t + 24) * sbh // t + 5 * scores // t
        )
        both = {"tensor_parallel": t, "sequence_parallel": True}
        assert saved(model, batch, seq, **both) == (34 * sbh + 5 * scores) // t
        assert saved(model, batch, seq, "selective", **both) == 34 * sbh // t
        assert saved(model, batch, seq, "full", **both) == 2 * sbh // t


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_figure_1(row):
    sizes = ("hidden", "heads", "seq_len", "micro_batch", "tensor_parallel", "layers")
    hidden, heads, seq, batch, t, layers = (int(row[size]) for size in sizes)
    model = gpt(hidden, heads, seq)
    stages, chunks = int(row["pipeline_parallel"]), int(row["interleaved"])
    # The first stage of a pipeline has as many micro-batches in flight as there are stages.
    factor = layers * (1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1)
    none = factor * saved(model, batch, seq, tensor_parallel=t)
    both = {"tensor_parallel": t, "sequence_parallel": True}
    selective = factor * saved(model, batch, seq, "selective", **both)
    assert none / GIB == pytest.approx(float(row["activations_none_gib"]), rel=1e-12)
    expected = float(row["activations_seqpar_selective_gib"])
    assert selective / GIB == pytest.approx(expected, rel=1e-12)


def test_flash_attention_saves_no_scores():
    model, tokens = gpt(96, 12, 40), 3 * 40
    recipe = specs.Recipe("zero-fp16", micro_batch=3, seq_len=40)
    events = work(model, recipe, Execution(), {"transformer.h.1"})
    now = {x.kind: x.now for x in events if x.name == "transformer.h.1"}
    # Inputs of two norms, four matrix products and GELU; q, k, v; one statistic a query and head.
    saved = 2 * 96 * tokens * (2 + (1 + 1 + 1 + 4) + 4 + 3) + 4 * 12 * tokens
    assert now["leave"] - now["enter"] == saved + STATISTICS * tokens


def test_a_llama_block_by_hand_is_what_the_program_keeps():
    """As exercise 02-block has it, without statistics and rotary tables."""
    from grading.exercises.act_block import BLOCK

    model, rows = specs.model("llama3-8b"), 512
    recipe = specs.Recipe("fsdp-bf16", seq_len=rows)
    config = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
    }
    tables = 2 * 2 * rows * model.head_dim
    statistics = 4 * rows * (2 + model.num_heads)
    by_hand = sum(BLOCK.reference(config, rows, 2).values())
    kept = sum(each.bytes for each in saved_by_block(model, recipe))
    assert kept == by_hand + statistics + tables
