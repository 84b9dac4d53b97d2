"""`course ledger`: what a job holds and communicates on each rank, from arithmetic alone.

It answers at once, so it stays with the pure floors; even rich is imported for the table alone.
First comes what an engineer asks: does it fit, by what margin, what is the peak made of, and which
one change would help most. Then the tables. A bare count of parameters has no activations, so its
peak is not known, and is absent from the JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from typer import Option

from course_lib import comm, specs
from course_lib.cli.explain import explained
from course_lib.comm import table as comm_table
from course_lib.errors import CourseError
from course_lib.ledger import COLOURS, LABELS, Ledger, Peak, buffers, gib, model_states, peak
from course_lib.ledger.advice import Change, best_change
from course_lib.ledger.execution import CUDA
from course_lib.ledger.table import HEAD, notes, rows, title

NO_PEAK = "A bare count of parameters: its activations, and so the peak of a step, are not known."
OUTSIDE = "Outside of the allocator: the CUDA context, 0.5 to 0.9 GiB, and NCCL's buffers."


def _names(names) -> str:
    return ", ".join(names) + "."


def ledger(
    model: Annotated[str, Option(metavar="NAME", help=_names(specs.models()))] = "",
    config: Annotated[str, Option(metavar="PATH", help="A Hugging Face config.json.")] = "",
    strategy: Annotated[str, Option(metavar="NAME", help=_names(specs.SHARDED))] = "ddp",
    gpus: Annotated[int, Option(help="Ranks, one to a GPU.")] = 1,
    gpus_per_node: Annotated[int, Option(help="What hsdp shards over.")] = 8,
    gpu: Annotated[str, Option(metavar="NAME", help=_names(specs.gpus()))] = "h100-sxm-80",
    precision: Annotated[
        str, Option(metavar="NAME", help=_names(specs.PRECISIONS))
    ] = specs.Recipe.precision,
    optimizer: Annotated[
        str, Option(metavar="NAME", help=_names(specs.OPTIMIZERS))
    ] = specs.Recipe.optimizer,
    micro_batch: Annotated[int, Option(help="Sequences per rank at a time.")] = 1,
    seq_len: Annotated[int, Option(help="Tokens in a sequence.")] = 2048,
    grad_accum: Annotated[int, Option(help="Micro-batches per optimizer step.")] = 1,
    checkpointing: Annotated[
        str, Option(metavar="NAME", help=_names(specs.CHECKPOINTING))
    ] = "none",
    wrap: Annotated[str, Option(help="layer, model, or N-params: what is gathered at once.")] = (
        "layer"
    ),
    reshard_after_forward: Annotated[
        bool, Option(help="Free gathered parameters after the forward pass.")
    ] = True,
    reshard_to: Annotated[
        int, Option(metavar="N", help="But of each unit keep 1/N, shared with N - 1 neighbours.")
    ] = 0,
    prefetch: Annotated[int, Option(help="Units that are sent for ahead of use.")] = 1,
    offload: Annotated[
        str, Option(metavar="NAME", help="To the host: " + _names(specs.OFFLOADED))
    ] = "none",
    trainable: Annotated[float, Option(help="Fraction that is not frozen, 0 to 1.")] = 1.0,
    explain: Annotated[
        bool, Option("--explain", help="Say where each byte of the peak comes from.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict, for the rank that has most, the peak of a step, the bytes of a job's model states
    and of its buffers, and a step's communication."""
    spec = _model(model, config)
    recipe = specs.Recipe(
        precision, optimizer, micro_batch, seq_len, grad_accum, checkpointing, trainable
    )
    reshard = _reshard(reshard_after_forward, reshard_to)
    spread = specs.Strategy(strategy, gpus, gpus_per_node, wrap, reshard, offload)
    device = specs.gpu(gpu)
    predicted = model_states(spec, recipe, spread)
    passing = buffers(spec, recipe, spread, prefetch=prefetch)
    plan = comm.step(spec, recipe, spread)
    moved = comm.offloaded(spec, recipe, spread)
    most = change = None
    if not spec.is_bare:
        tuning = {"prefetch": prefetch, "gathers": max(prefetch, 1)}
        most = peak(spec, recipe, spread, CUDA, **tuning)
        if not as_json:
            change = best_change(spec, recipe, spread, CUDA, **tuning)
    if as_json:
        job = {"model": spec.name, "strategy": strategy, "gpu": gpu, "prefetch": prefetch}
        job |= asdict(spread) | asdict(recipe) | ({"config": config} if config else {})
        del job["name"]  # the strategy's, which it has already
        told = {"job": job, **predicted.to_dict()}
        told["bytes"] |= passing.by_category()
        told |= _told(told["bytes"], most)
        told["lines"] += passing.to_dict()["lines"]
        told["communication"] = plan.to_dict() | {"offload": asdict(moved)}
        print(json.dumps(told, indent=2))
    else:
        _print_tables(predicted, passing, plan, moved, device, most, change)
        if explain and most:
            print()
            for line in explained(spec, recipe, spread, CUDA, most):
                print(line)


def _told(states: dict[str, int], most: Peak | None) -> dict:
    """What JSON has of a peak: its parts that are no model states and no buffers, and where it is.

    `at_peak` are all its parts, which add up to it.
    """
    if most is None:
        return {}
    parts = {name: most.by_category.get(name, 0) for name in ("activations", "logits", "other")}
    reserved = {"reserved_low": most.bytes, "reserved_high": most.apart}
    allocated = {"peak_allocated": most.bytes}
    return {
        "bytes": states | parts | allocated | reserved,
        "peak_at": most.at,
        "at_peak": most.by_category,
    }


def _reshard(freed: bool, to: int) -> bool | int:
    if to and not freed:
        raise CourseError(
            f"You gave --reshard-to {to}, to keep a part after forward, and "
            "--no-reshard-after-forward, to keep all: give one of them."
        )
    return to or freed


def _model(model: str, config: str) -> specs.ModelSpec:
    if bool(model) == bool(config):
        given = "both a model and a config" if model else "neither a model nor a config"
        raise CourseError(
            f"You gave {given}: name one of them, with --model NAME or --config config.json."
        )
    return specs.model(model) if model else specs.read_config(config)


def _print_tables(
    predicted: Ledger,
    passing: Ledger,
    plan: comm.Plan,
    moved: comm.Offloaded,
    device: specs.Gpu,
    most: Peak | None,
    change: Change | None,
) -> None:
    from rich.console import Console

    *heads, _ = comm_table.HEAD
    traffic = _table(heads)
    traffic.add_column("why")
    *lines, total = comm_table.rows(plan)
    for line in lines:
        traffic.add_row(*line)
    traffic.add_row(*total, style="bold")
    console = Console(highlight=False, soft_wrap=True)
    console.print(title(predicted), markup=False)
    if most:
        console.print("\n".join(_answer(most, change, device)), markup=False)
        console.print()
    console.print(_memory(predicted, HEAD))
    console.print("\n".join([*notes(predicted), _verdict(predicted.total, device)]), markup=False)
    if passing.lines:
        console.print()
        *buffer_rows, _ = rows(passing)  # without a total: they are not most at the same moment
        console.print(_memory(passing, ("at most at once", *HEAD[1:-1]), buffer_rows))
        console.print("\n".join(notes(passing)), markup=False)
    console.print()
    console.print(traffic)
    if moved.total:
        console.print(f"Between GPU and host: {moved}", markup=False)
    console.print(OUTSIDE if most else NO_PEAK, markup=False)


def _answer(most: Peak, change: Change | None, device: specs.Gpu) -> list[str]:
    """Does it fit, what is the peak made of, and what would help."""
    room = device.memory_bytes
    spare = room - most.bytes
    fits = f"fits, {gib(spare)} to spare" if spare >= 0 else f"does not fit, {gib(-spare)} too much"
    parts = sorted(most.by_category.items(), key=lambda part: -part[1])
    made_of = ", ".join(
        f"{LABELS[name]} {gib(nbytes)}" for name, nbytes in parts if nbytes >= 2**20
    )
    helps = "No single change lowers it by 2%."
    if change:
        lower = gib(most.bytes - change.peak.bytes)
        helps = f"What would lower it most, by {lower} to {gib(change.peak.bytes)}: {change.what}."
    return [
        f"Peak of a step: {gib(most.bytes)} in the {gib(room)} of {device.name}: {fits}.",
        f"It is made of {made_of}.",
        f"It comes {most.when}. The allocator reserves {gib(most.bytes)} to {gib(most.apart)}.",
        helps,
    ]


def _memory(ledger: Ledger, head: Sequence[str], chosen=None):
    table = _table(head)
    for row in rows(ledger) if chosen is None else chosen:
        what, *numbers = row.cells[: len(head)]
        swatch = f"[{COLOURS[row.category]}]\N{BLACK SQUARE}[/] " if row.category else "  "
        table.add_row(swatch + what, *numbers, style="bold" if row.category or row.total else "")
    return table


def _table(heads: Sequence[str]):
    """A table without lines: what it is about to the left, numbers to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(heads[0], no_wrap=True)
    for heading in heads[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _verdict(total: int, device: specs.Gpu) -> str:
    """Do the model states alone fit, and by what margin?"""
    room = device.memory_bytes
    outcome = f"fit, {gib(room - total)} to spare" if total <= room else "do not fit"
    outcome += f", {gib(total - room)} too much" if total > room else ""
    return f"Model states of {gib(total)} in the {gib(room)} of {device.name}: {outcome}."
