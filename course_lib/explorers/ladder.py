"""The ladder explorer: what each rung of ZeRO saves on a rank, and what it costs to send."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape

import ipywidgets as widgets
from matplotlib.axes import Axes

from course_lib import comm, ledger, specs
from course_lib.explorers.base import Explorer
from course_lib.figures import ladder as figure
from course_lib.figures.ladder import Rung, duration
from course_lib.specs import human

STAGES = ("ddp", "zero1", "zero2", "zero3")
COUNTS = tuple(base * 10**power for power in range(7, 12) for base in (1, 2, 5))  # parameters
RANKS = tuple(2**exponent for exponent in range(13))
MICRO_BATCHES = tuple(2**exponent for exponent in range(7))
GPUS_PER_NODE = 8
TIME = "communication takes"

SHARDED = {"zero1": "optimizer states", "zero2": "gradients", "zero3": "parameters"}
WHY = {  # a rung costs what it costs
    "zero2": ", as every micro-batch is reduce-scattered",
    "zero3": ", as every micro-batch gathers the parameters, twice",
}
HARDLY = 1e-3  # of what a rung moves: the padding of uneven shards


@dataclass(frozen=True)
class Result:
    """The rungs, how many collectives each issues in a step, and the rung that was chosen."""

    rungs: tuple[Rung, ...]
    collectives: tuple[int, ...]
    chosen: int
    gpu: specs.Gpu
    network: str

    def fits(self, rung: Rung) -> bool:
        """Do the model states alone fit into the GPU?"""
        return rung.held <= self.gpu.memory_bytes


def compute(
    model: str | int, ranks: int, link: str, accumulation: int, precision: str, gpu: str, rung: str
) -> Result:
    """All rungs of one job. `model`: a preset's name, or a bare count of parameters.

    `accumulation` micro-batches make a step. Raises CourseError where there is no such job.
    """
    spec = specs.model(model) if isinstance(model, str) else _bare(model)
    recipe = specs.Recipe(precision, grad_accum=accumulation)
    topology = comm.Topology.of(specs.Cluster(ranks, GPUS_PER_NODE, gpu, link))
    step = partial(comm.step, spec, recipe)

    # Buckets as large as the largest unit: rungs differ by what they shard, not by their latencies.
    top = step(specs.Strategy("zero3", ranks))
    bucket_bytes = max(unit.payload for unit in top.lines[0].collectives)
    rungs, collectives = [], []
    for name in STAGES:
        strategy = specs.Strategy(name, ranks)
        plan = top if name == "zero3" else step(strategy, bucket_bytes)
        held = ledger.model_states(spec, recipe, strategy).by_category()
        seconds = comm.step_seconds(plan, topology)
        rungs.append(Rung(name, **held, peak=None, moved=plan.bytes_per_rank, seconds=seconds))
        collectives.append(plan.count)
    device = specs.gpu(gpu)
    network = link if ranks > GPUS_PER_NODE else device.scale_up_kind
    return Result(tuple(rungs), tuple(collectives), STAGES.index(rung), device, network)


def _bare(count: int) -> specs.ModelSpec:
    return specs.ModelSpec("a bare count", "bare", count=count)


def draw(axes: Axes) -> Callable[[Result], None]:
    """A row for each rung; the function that is returned shows a result in them."""
    picture = axes.figure
    axes.remove()
    picture.set_size_inches(7.4, 2.73)
    panels = figure.Panels(picture, STAGES, TIME)

    def update(result: Result) -> None:
        capacity = f"{result.gpu.name}, {result.gpu.memory_gb} GiB"
        panels.update(result.rungs, result.chosen, (capacity, result.gpu.memory_bytes))

    return update


def words(result: Result) -> tuple[str, str]:
    """Alternative text, and the table: what the next rung changes, and a row for each rung."""
    summary = _next(result)
    gpu = f"Capacity of {result.gpu.name}: {human(result.gpu.memory_bytes, digits=0)}."
    alt = f"{figure.words(result.rungs, TIME)} {gpu} {summary}"
    return alt, f"<p><strong>{escape(summary)}</strong></p>{_table(result)}"


def _next(result: Result) -> str:
    """What the rung after the chosen one buys, and what it costs."""
    here = result.rungs[result.chosen]
    if here is result.rungs[-1]:
        return (
            f"{here.name} is the last rung, with {human(here.held)} on each rank: more ranks buy "
            "smaller shards, and cost latency."
        )
    rung = result.rungs[result.chosen + 1]
    saved, more = here.held - rung.held, rung.moved - here.moved
    buys = (
        f"{human(saved)} on each rank" if saved > 0 else "nothing, as there is nobody to share with"
    )
    if abs(more) <= HARDLY * here.moved:
        costs = "nothing, as it moves as many bytes"
    elif more < 0:
        costs = f"nothing: it even moves {human(-more)} less"
    else:
        time = duration(max(rung.seconds - here.seconds, 0))
        costs = f"{human(more)} and {time} more in each step{WHY.get(rung.name, '')}"
    return f"Next, {rung.name} shards the {SHARDED[rung.name]}: it buys {buys}, and costs {costs}."


def _table(result: Result) -> str:
    *states, moved, time = figure.heads(result.rungs)
    heads = (*states, f"fits {result.gpu.name}", moved, "collectives", f"over {result.network}")
    rows = []
    for index, rung in enumerate(result.rungs):
        name, *held, moved, time = figure.cells(rung, result.rungs)
        verdict = "yes" if result.fits(rung) else "no"
        numbers = (*held, verdict, moved, f"{result.collectives[index]:,}", time)
        label = f"<strong>{name}</strong> (chosen)" if index == result.chosen else name
        rows.append(_row(label, numbers, "td"))
    return (
        f"<table><thead>{_row(heads[0], heads[1:], 'th')}</thead><tbody>{''.join(rows)}</tbody>"
        "</table><p><small>Model states alone; activations and buffers come on top. Communication "
        "on rings, one collective after another, nothing hidden; buckets as large as zero3's "
        f"largest unit; nodes of {GPUS_PER_NODE}.</small></p>"
    )


def _row(label: str, cells: tuple[str, ...], tag: str) -> str:
    rest = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f'<tr><{tag} style="text-align:left">{label}</{tag}>{rest}</tr>'


def ladder(
    model: str | int = "llama3-8b",
    ranks: int = 64,
    link: str = "ib-ndr",
    accumulation: int = 1,
    precision: str = "zero-bf16",
    gpu: str = "h100-sxm-80",
    rung: str = "ddp",
) -> Explorer:
    """The explorer, starting from the given job, with AdamW, on `rung`.

    `model` is a preset's name or a bare count of parameters. Its slider has both, by size, which
    grows about twofold from one to the next; that of `ranks` moves over powers of two.
    """
    wide = {"style": {"description_width": "7em"}, "layout": {"width": "23em"}}
    slider, dropdown = widgets.SelectionSlider, widgets.Dropdown
    controls = {
        "model": slider(options=_models(model), value=model, description="model", **wide),
        "ranks": slider(options=RANKS, value=ranks, description="ranks", **wide),
        "accumulation": slider(
            options=MICRO_BATCHES, value=accumulation, description="accumulation", **wide
        ),
        "rung": dropdown(options=STAGES, value=rung, description="rung", **wide),
        "link": dropdown(options=specs.links(), value=link, description="link", **wide),
        "precision": dropdown(
            options=list(specs.PRECISIONS), value=precision, description="precision", **wide
        ),
        "gpu": dropdown(options=specs.gpus(), value=gpu, description="gpu", **wide),
    }
    return Explorer(controls, compute, draw, words)


def _models(chosen: str | int) -> list[tuple[str, str | int]]:
    """The slider's options, label and value: presets and bare counts, the smallest first."""
    presets = {name: specs.model(name).parameters for name in specs.models()}
    bare = {count: count for count in (*COUNTS, *([] if chosen in presets else [chosen]))}
    sizes = {**presets, **bare}
    return [
        (_billions(size) if value == size else f"{value}, {_billions(size)}", value)
        for value, size in sorted(sizes.items(), key=lambda item: item[1])
    ]


def _billions(count: int) -> str:
    return f"{float(f'{count / 1e9:.3g}'):,g} billion"
