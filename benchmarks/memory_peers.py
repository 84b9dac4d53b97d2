"""What the memory estimators predict for published jobs, beside the peaks that were published.

    python benchmarks/memory_peers.py                the rows that the ledger is calibrated by
    python benchmarks/memory_peers.py --further      the other rows of the same sources, too

A peer that is not installed is named, and left out. A number is shown for every job that a peer
has one for, and below the table stands what of these jobs that peer was not able to be told: where
it has no word for a thing, its number is that of a job without it. Errors are (predicted -
published) / published. No peer models an allocator, so that against "reserved" even a perfect
prediction of the allocated bytes falls short.
"""

import argparse
import contextlib
import dataclasses
import io
import logging
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from course_lib import ledger, specs
from course_lib.ledger import calibration
from course_lib.specs.tables import rows

PUBLISHED = Path(ledger.__file__).parent / "data" / "measured_memory.csv"
GIB = 2**30
GPUS_PER_NODE = 8

Row = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Peer:
    """An estimator: `predict(row)` gives the bytes on one GPU, `lacks(row)` what it has no word for
    in the row's job, in words."""

    package: str
    what: str
    predict: Callable[[Row], float]
    lacks: Callable[[Row], list[str]]

    @property
    def name(self) -> str:
        return f"{self.package} {self.what}".strip()

    @property
    def version(self) -> str | None:
        """None where the package is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


def ours(row: Row) -> int:
    """The bytes that the ledger predicts for the row's job."""
    return calibration.job(row).predicted().bytes


# Peers.


def llm_analysis(row: Row) -> float:
    """LLMAnalysis.training, of which all that lies on the GPU is added up.

    Weights are told to be 16 bits: the fp32 parameters of these jobs are its optimizer's master
    copy, and the 2 bytes more per parameter, sharded, are its own. Its GPU gets memory without end:
    it refuses a batch that it thinks too large, and the jobs of this table did run.
    """
    from llm_analysis import analysis, config

    ffn, hidden = int(row["intermediate"]), int(row["hidden"])
    model = config.ModelConfig(
        name=row["published_model"],
        num_layers=int(row["layers"]),
        n_head=int(row["heads"]),
        hidden_dim=hidden,
        vocab_size=int(row["vocab"]),
        max_seq_len=int(row["seq_len"]),
        num_key_value_heads=int(row["kv_heads"]),
        ffn_embed_dim=ffn,
        expansion_ratio=ffn / hidden,
        model_type="llama",
    )
    recompute, gpu = (
        analysis.ActivationRecomputation,
        config.get_gpu_config_by_name("h100-sxm-80gb"),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        summary = analysis.LLMAnalysis(
            model,
            dataclasses.replace(gpu, mem_per_GPU_in_GB=2**20),
            config.get_dtype_config_by_name("w16a16e16"),
            config.ParallelismConfig(dp_size=int(row["gpus"])),
            flops_efficiency=0.5,  # asked for, and of no weight here
        ).training(
            batch_size_per_gpu=int(row["micro_batch"]),
            gradient_accumulation_steps=1,
            seq_len=int(row["seq_len"]),
            activation_recomputation=recompute[row["checkpointing"].upper()],
            ds_zero=analysis.DSZeRO.STAGE_3,
            mlp_gated_linear_units=True,
        )
    held = ("weight", "gradient", "optimizer_state", "activation")
    return sum(summary[f"{what}_memory_per_gpu"] for what in held)


def llm_analysis_lacks(row: Row) -> list[str]:
    lacks = [
        "a gated MLP's third matrix and a head of its own: it counts 5.6 of Llama 3's 8.0 billion",
        "whole parameters gathered by units, buffers for reduction, prefetch, FSDP1 or FSDP2",
        "fp32 copies of the logits and their gradients: it counts bf16 logits once",
        "a fp32, unfused RMSNorm's intermediates",
    ]
    if row["checkpointing"] == "selective":
        lacks.append(
            "selective by operator: its 'selective' recomputes attention alone, and keeps the rest"
        )
    if row["checkpointing"] == "full":
        lacks.append("the block that is recomputed in backward")
    return lacks + _compiled(row)


def zero3(row: Row) -> float:
    """DeepSpeed's estimate from the numbers of parameters ('cold'), nothing offloaded."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    gpus, vocab, hidden = int(row["gpus"]), int(row["vocab"]), int(row["hidden"])
    _, gpu, _ = estimate_zero3_model_states_mem_needs(
        total_params=specs.model(row["model"]).parameters,
        largest_layer_params=vocab * hidden,  # as its 'live' one finds: the largest module's own
        num_gpus_per_node=GPUS_PER_NODE,
        num_nodes=gpus // GPUS_PER_NODE,
        cpu_offload=False,
        cpu_offload_params=False,
        zero_init=True,
    )
    return gpu


def zero3_lacks(row: Row) -> list[str]:
    return [
        "batch, sequence and checkpointing: it is about model states, without activations, logits",
        "units, and FSDP1 or FSDP2: of buffers it counts the largest single module",
        *_compiled(row),
    ]


def _compiled(row: Row) -> list[str]:
    return [] if row["compile"] == "no" else ["torch.compile, and what it no longer keeps"]


PEERS = (
    Peer("llm-analysis", "training(ds_zero=3)", llm_analysis, llm_analysis_lacks),
    Peer("deepspeed", "estimate_zero3", zero3, zero3_lacks),
)


# The table.


def job(row: Row) -> str:
    compiled = "" if row["compile"] == "no" else " compiled"
    shape = f"{row['micro_batch']}x{row['seq_len']}"
    what = f"{row['published_model']} {row['api']} N={row['gpus']} {shape} {row['checkpointing']}"
    return f"{what}{compiled}, {row['kind']}"


def beside(predicted: float | None, published: float, nothing: str) -> str:
    if predicted is None:
        return f"{nothing:>20}"
    gib = predicted / GIB
    return f"{gib:11.2f} {100 * (gib - published) / published:+7.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--further", action="store_true", help="all rows, not only calibration's")
    every = parser.parse_args().further
    logging.disable(logging.CRITICAL)
    installed = [peer for peer in PEERS if peer.version]
    jobs = [row for row in rows(PUBLISHED) if every or row["set"] == "calibration"]
    heads = [f"{peer.package:>20}" for peer in installed]
    print(f"{'GiB':<64}{'published':>10}{'ours':>20}{''.join(heads)}")
    lacks = {peer.name: {} for peer in installed}
    for row in jobs:
        published = float(row["value"])
        cells = [beside(ours(row), published, "")]
        for peer in installed:
            cells.append(beside(peer.predict(row), published, ""))
            lacks[peer.name] |= dict.fromkeys(peer.lacks(row))
        print(f"{job(row):<64}{published:>10.2f}{''.join(cells)}")
    for peer in PEERS:
        print(f"\n{peer.name}: {peer.version or 'not installed'}")
        for what in lacks.get(peer.name, ()):
            print(f"  cannot express {what}")


if __name__ == "__main__":
    main()
