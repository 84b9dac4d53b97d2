import json
import subprocess
import sys

import pytest

from course_lib.cli import main
from course_lib.specs import MODEL_STATES


def course(capsys, monkeypatch, *arguments) -> tuple[int, str, str]:
    """Run `course ledger`: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["course", "ledger", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err


@pytest.fixture
def ledger(capsys, monkeypatch):
    return lambda *arguments: course(capsys, monkeypatch, *arguments)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    keys = {"hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1, "vocab_size": 5}
    path.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 3, **keys}))
    return path


PAPER = ("--model", "paper-7.5b", "--precision", "zero-fp16", "--strategy", "zero3", "--gpus", 64)


def test_the_papers_model_on_64_gpus(ledger):
    code, out, _ = ledger(*PAPER, "--json")
    data = json.loads(out)
    assert code == 0
    states = ("parameters", "gradients", "optimizer_states")
    assert sum(data["bytes"][state] for state in states) == 1_875_000_000
    assert data["parameters_total"] == 7_500_000_000
    assert data["job"] == {
        "model": "paper-7.5b",
        "strategy": "zero3",
        "gpu": "h100-sxm-80",
        "prefetch": 1,
        "gpus": 64,
        "gpus_per_node": 8,
        "wrap": "layer",
        "reshard_after_forward": True,
        "offload": "none",
        "precision": "zero-fp16",
        "optimizer": "adamw",
        "micro_batch": 1,
        "seq_len": 2048,
        "grad_accum": 1,
        "checkpointing": "none",
        "trainable": 1.0,
    }


def test_of_a_bare_count_there_is_no_peak(ledger):
    data = json.loads(ledger(*PAPER, "--json")[1])
    assert set(data["bytes"]) == {
        *("parameters", "gradients", "optimizer_states"),
        *("gather_buffers", "reduce_buffers"),
    }
    assert "peak_at" not in data


def test_three_times_the_papers_model_crosses_between_ranks(ledger):
    """Two bytes of each parameter, of which 63/64 come from other ranks: a gather for forward, a
    gather for backward, and the gradients, in each of two micro-batches."""
    told = json.loads(ledger(*PAPER, "--grad-accum", 2, "--json")[1])["communication"]
    once = 2 * 7_500_000_000 * 63 // 64
    lines = [(x["collective"], x["count"], x["bytes_per_rank"]) for x in told["per_step"]]
    kinds = ("all_gather", "all_gather", "reduce_scatter")
    assert lines == [(kind, 2, 2 * once) for kind in kinds]
    assert all(x["why"] for x in told["per_step"])
    assert told["total_bytes_per_rank"] == 6 * once


def test_flags_reach_the_communication(ledger):
    def moved(*flags):
        out = ledger("--model", "lab-25m", "--strategy", "fsdp", "--gpus", 4, *flags, "--json")[1]
        return [(x["collective"], x["count"]) for x in json.loads(out)["communication"]["per_step"]]

    assert moved() == [("all_gather", 9), ("all_gather", 8), ("reduce_scatter", 9)]
    assert moved("--no-reshard-after-forward") == [("all_gather", 9), ("reduce_scatter", 9)]
    assert moved("--wrap", "model") == [("all_gather", 1), ("reduce_scatter", 1)]
    assert moved("--trainable", 0) == [("all_gather", 9)]


def test_every_flag_is_taken_and_echoed(ledger, config):
    flags = {
        "strategy": "hsdp",
        "gpus": 8,
        "gpus-per-node": 4,
        "gpu": "a100-sxm-40",
        "precision": "fsdp-bf16",
        "optimizer": "sgd-momentum",
        "micro-batch": 3,
        "seq-len": 4096,
        "grad-accum": 2,
        "checkpointing": "full",
        "wrap": "1000000-params",
        "prefetch": 2,
        "offload": "all",
        "trainable": 0.5,
        "config": str(config),
    }
    arguments = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
    code, out, _ = ledger(*arguments, "--no-reshard-after-forward", "--json")
    data = json.loads(out)
    echoed = {flag.replace("-", "_"): value for flag, value in flags.items()}
    assert code == 0
    assert data["job"] == {
        **echoed,
        "model": config.parent.name,
        "reshard_after_forward": False,
    }
    held = ("parameters", "gradients", "optimizer_states")
    assert sum(data["bytes"][category] for category in held) == 0
    assert data["host_bytes"] > 0


def test_tuning_fsdp_changes_buffers_and_communication_and_no_model_states(ledger):
    def told(*flags):
        job = ("--model", "llama3-8b", "--strategy", "fsdp", "--gpus", 64, *flags, "--json")
        data = json.loads(ledger(*job)[1])
        buffers = [data["bytes"].pop(name) for name in ("gather_buffers", "reduce_buffers")]
        states = {name: data["bytes"][name] for name in MODEL_STATES}
        return buffers, states, data["communication"]

    (gather, reduce), states, moved = told()
    again = told("--prefetch", 3)
    assert again[0][0] > gather and again[1:] == (states, moved)
    coarse = told("--wrap", "model")
    assert coarse[0][0] > gather and coarse[0][1] > reduce and coarse[1] == states
    kept = told("--no-reshard-after-forward")
    assert kept[0][0] == 4 * 8_030_261_248 and kept[0][1] == reduce and kept[1] == states
    near = told("--reshard-to", 8)
    assert gather < near[0][0] < kept[0][0] and near[0][1] == reduce and near[1] == states
    sent = [told[2]["total_bytes_per_rank"] for told in (kept, near)]
    assert sent[0] < sent[1] < moved["total_bytes_per_rank"]
    hsdp = told("--strategy", "hsdp")
    assert hsdp[0][0] == gather and hsdp[1]["parameters"] > states["parameters"]
    offloaded = told("--offload", "all")
    assert offloaded[0][0] > gather  # shards come to the GPU to be gathered
    assert offloaded[2]["offload"]["to_device"] > offloaded[2]["offload"]["to_host"] > 0
    assert moved["offload"] == {"to_device": 0, "to_host": 0}


def test_buffers_are_shown_without_a_total(ledger):
    job = ("--model", "lab-25m", "--strategy", "fsdp", "--gpus", 4)
    _, memory, buffers, communication = ledger(*job, "--offload", "all")[1].split("\n\n")
    assert "total on the GPU" in memory and "total" not in buffers
    assert buffers.startswith("at most at once")
    assert "■ gather buffers" in buffers and "backward of model.layers.7" in buffers
    assert "Between GPU and host: " in communication
    assert "at most at once" not in ledger("--model", "lab-25m")[1]


def test_the_tables_have_a_verdict_communication_and_what_is_missing(ledger):
    code, out, _ = ledger(*PAPER)
    memory, _, communication = out.split("\n\n")
    assert code == 0
    assert "fp32 master copy" in memory
    assert memory.splitlines()[-1] == (
        "Model states of 1.75 GiB in the 80.00 GiB of h100-sxm-80: fit, 78.25 GiB to spare."
    )
    head, *_, total, missing = communication.splitlines()
    assert head.split() == ["per", "rank", "and", "step", "count", "bytes", "why"]
    assert total.split() == ["total", "3", "44,296,875,000", "41.25", "GiB"]
    assert missing == (
        "A bare count of parameters: its activations, and so the peak of a step, are not known."
    )


def test_the_answer_comes_first(ledger):
    job = ("--model", "llama3-8b", "--strategy", "fsdp", "--gpus", 64, "--seq-len", 8192)
    job += ("--precision", "fsdp-bf16")
    code, out, _ = ledger(*job)
    answer, *_ = out.split("\n\n")
    _, fits, parts, when, helps = answer.splitlines()
    data = json.loads(ledger(*job, "--json")[1])
    held = data["bytes"]
    most, spare = held["peak_allocated"] / 2**30, 80 - held["peak_allocated"] / 2**30
    assert code == 0
    assert fits == (
        f"Peak of a step: {most:.2f} GiB in the 80.00 GiB of h100-sxm-80: "
        f"fits, {spare:.2f} GiB to spare."
    )
    assert parts.startswith("It is made of activations ") and "logits 11.74 GiB" in parts
    assert when.startswith("It comes in the loss's backward. The allocator reserves ")
    assert helps.endswith(": full checkpointing.")
    lower = json.loads(ledger(*job, "--checkpointing", "full", "--json")[1])
    assert f"to {lower['bytes']['peak_allocated'] / 2**30:.2f} GiB" in helps
    assert "Outside of the allocator" in out


def test_the_parts_of_the_peak_add_up(ledger):
    data = json.loads(ledger("--model", "gpt2-xl", "--strategy", "zero2", "--gpus", 8, "--json")[1])
    held, parts = data["bytes"], data["at_peak"]
    assert sum(parts.values()) == held["peak_allocated"] == held["reserved_low"]
    assert held["reserved_low"] < held["reserved_high"]
    for name in ("activations", "logits", "other"):
        assert held[name] == parts.get(name, 0)
    assert held["parameters"] == parts["parameters"]
    assert data["peak_at"]


def test_a_job_without_a_better_neighbour(ledger):
    """One rank, all frozen, and few tokens: what is left are the parameters."""
    job = ("--model", "llama3-8b", "--trainable", 0.0, "--seq-len", 16)
    job += ("--precision", "pure-bf16")
    assert "No single change lowers it by 2%." in ledger(*job)[1]


def test_a_model_that_does_not_fit(ledger):
    code, out, _ = ledger("--model", "llama3-8b", "--gpu", "a100-sxm-40")
    assert code == 0
    assert "do not fit, 79.66 GiB too much." in out


def test_markup_in_a_models_name_is_not_read_as_style(ledger, config):
    renamed = config.rename(config.with_name("[red]x.json"))
    assert ledger("--config", renamed)[1].startswith("[red]x, 348 parameters")


@pytest.mark.parametrize(
    "arguments, told",
    [
        ((), "neither a model nor a config"),
        (("--model", "gpt2", "--config", "config.json"), "both a model and a config"),
        (("--model", "lama3-8b"), "did you mean 'llama3-8b'"),
        (("--config", "nowhere.json"), "There is no file nowhere.json"),
        (("--model", "gpt2", "--gpus", 0), "gpus is 0"),
        (("--model", "gpt2", "--strategy", "zero5"), "'zero3'"),
        (("--model", "gpt2", "--gpu", "h100"), "'h100-sxm-80'"),
        (("--model", "gpt2", "--precision", "fp8"), "no precision called 'fp8'"),
        (("--model", "gpt2", "--optimizer", "lion"), "no optimizer called 'lion'"),
        (("--model", "gpt2", "--checkpointing", "some"), "no checkpointing called 'some'"),
        (("--model", "gpt2", "--wrap", "block"), "wrap is 'block'"),
        (("--model", "gpt2", "--seq-len", 0), "seq_len is 0"),
        (("--model", "gpt2", "--trainable", 2), "trainable is 2.0"),
        (("--model", "gpt2", "--strategy", "zero1", "--optimizer", "sgd"), "nothing to shard"),
        (("--model", "gpt2", "--offload", "all"), "ddp needs its parameters whole"),
        (("--model", "gpt2", "--prefetch", -1), "prefetch is -1"),
        (("--model", "gpt2", "--reshard-to", 2), "a number of ranks"),
        (("--model", "gpt2", "--reshard-to", 2, "--no-reshard-after-forward"), "give one of them"),
        (("--model", "gpt2", "--strategy", "hsdp", "--gpus", 12), "do not fill nodes of 8"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_2(ledger, arguments, told):
    code, out, err = ledger(*arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert len(err.splitlines()) == 1


def test_json_is_printed_without_rich_or_torch():
    script = (
        "import sys; from course_lib.cli import main; "
        "sys.argv = ['course', 'ledger', '--model', 'gpt2', '--json']\n"
        "try: main()\n"
        "finally: print(sorted({'rich', 'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert json.loads(done.stdout)["parameters_total"] == 124_439_808
    assert done.stderr.strip() == "[]"


def test_explain_says_where_bytes_come_from(ledger):
    job = ("--model", "llama3-8b", "--strategy", "fsdp", "--gpus", 8, "--precision", "fsdp-bf16")
    code, out, _ = ledger(*job, "--explain")
    states, block, logits, peak = out.split("\n\n")[-4:]
    parts = [line for line in block.splitlines() if line.startswith("  ")]
    each = [int(line.split(" B = ")[0].split()[-1].replace(",", "")) for line in parts]
    assert code == 0
    assert "Source: PyTorch, torch.distributed.fsdp.fully_shard." in states
    assert f"A block keeps {sum(each):,} bytes for backward" in block
    assert f"2,048 tokens × 128,256 = {2048 * 128_256:,}" in logits
    data = json.loads(ledger(*job, "--json")[1])
    for nbytes in (*data["at_peak"].values(), data["bytes"]["peak_allocated"]):
        assert f"{nbytes:,} B" in peak
