"""The memory ledger explorer: what each rank holds, at each stage of sharding."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets
from matplotlib.axes import Axes

from course_lib import ledger, specs
from course_lib.errors import CourseError
from course_lib.explorers.base import Explorer
from course_lib.figures.bars import StackedBars
from course_lib.ledger import COLOURS, LABELS, Ledger

STAGES = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Result:
    """The ledger of each stage at which there is something to shard, and the chosen stage."""

    ledgers: dict[str, Ledger]
    chosen: str
    gpu: specs.Gpu

    @property
    def margin(self) -> int:
        """Bytes that the chosen ledger leaves on the GPU; negative where it does not fit."""
        return self.gpu.memory_bytes - self.ledgers[self.chosen].total


def compute(model: str, precision: str, optimizer: str, stage: str, ranks: int, gpu: str) -> Result:
    """All stages' ledgers for one job. Raises CourseError where the chosen one is impossible."""
    spec, recipe = specs.model(model), specs.Recipe(precision, optimizer)
    ledgers = {}
    for name in STAGES:
        try:
            ledgers[name] = ledger.model_states(spec, recipe, specs.Strategy(name, gpus=ranks))
        except CourseError:
            if name == stage:
                raise
    return Result(ledgers, stage, specs.gpu(gpu))


def draw(axes: Axes) -> Callable[[Result], None]:
    """One bar for each stage; the function that is returned shows a result in them."""
    bars = StackedBars(axes, STAGES, specs.MODEL_STATES)

    def update(result: Result) -> None:
        stacks = [
            result.ledgers[name].by_category() if name in result.ledgers else {} for name in STAGES
        ]
        bars.update(stacks, STAGES.index(result.chosen), result.gpu.memory_bytes, _capacity(result))

    return update


def _capacity(result: Result) -> str:
    return f"{result.gpu.name}: {ledger.gib(result.gpu.memory_bytes, digits=0)}"


def words(result: Result) -> tuple[str, str]:
    """Alternative text, and the table: a row for each stage, a column for each category."""
    chosen = result.ledgers[result.chosen]
    verdict = "fits" if result.margin >= 0 else "does not fit"
    left = "to spare" if result.margin >= 0 else "too much"
    summary = (
        f"{result.chosen}: {ledger.gib(chosen.total)} of model states on each rank; "
        f"{verdict}, {ledger.gib(abs(result.margin))} {left}. Activations and buffers come on top."
    )
    totals = ", ".join(f"{name} {ledger.gib(x.total)}" for name, x in result.ledgers.items())
    alt = f"Stacked bars of model states per rank: {totals}. Capacity of {_capacity(result)}."
    return alt, f"<p><strong>{escape(summary)}</strong></p>{_table(result)}"


def _table(result: Result) -> str:
    categories = tuple(result.ledgers[result.chosen].by_category())
    heads = "".join(
        f'<th><span aria-hidden="true" style="color:{COLOURS[c]}">\N{BLACK SQUARE}</span> '
        f"{LABELS[c]}</th>"
        for c in categories
    )
    rows = "".join(_row(name, x, name == result.chosen) for name, x in result.ledgers.items())
    return (
        f"<table><thead><tr><th>GiB on each rank</th>{heads}<th>total</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _row(name: str, states: Ledger, chosen: bool) -> str:
    numbers = (*states.by_category().values(), states.total)
    cells = "".join(f"<td>{number / 2**30:,.3f}</td>" for number in numbers)
    label = f"<strong>{name}</strong> (chosen)" if chosen else name
    return f'<tr><td style="text-align:left">{label}</td>{cells}</tr>'


def memory_ledger(
    model: str = "llama3-8b",
    precision: str = "zero-fp16",
    optimizer: str = "adamw",
    stage: str = "ddp",
    ranks: int = 8,
    gpu: str = "h100-sxm-80",
) -> Explorer:
    """The explorer, starting from the given job. `ranks` moves over powers of two."""
    wide = {"style": {"description_width": "5em"}, "layout": {"width": "21em"}}
    powers = [2**exponent for exponent in range(13)]
    controls = {
        "ranks": widgets.SelectionSlider(options=powers, value=ranks, description="ranks", **wide),
        "model": _dropdown("model", specs.models(), model, wide),
        "stage": _dropdown("stage", STAGES, stage, wide),
        "precision": _dropdown("precision", specs.PRECISIONS, precision, wide),
        "optimizer": _dropdown("optimizer", specs.OPTIMIZERS, optimizer, wide),
        "gpu": _dropdown("gpu", specs.gpus(), gpu, wide),
    }
    return Explorer(controls, compute, draw, words)


def _dropdown(name: str, options, value: str, wide: dict) -> widgets.Dropdown:
    return widgets.Dropdown(options=list(options), value=value, description=name, **wide)
