"""The step's memory explorer: what a rank holds from moment to moment, and where the peak is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

import ipywidgets as widgets
from matplotlib.axes import Axes

from course_lib import ledger, specs
from course_lib.explorers.base import Explorer
from course_lib.figures.step_memory import Phase, StepMemory
from course_lib.ledger import COLOURS, LABELS, Peak

MODELS = tuple(name for name in specs.models() if not specs.model(name).is_bare)
STAGES = tuple(specs.SHARDED)
POWERS = tuple(2**exponent for exponent in range(13))
MICRO_BATCHES = POWERS[:7]
SEQUENCES = tuple(2**exponent for exponent in range(9, 18))
OWN = 0  # a vocabulary: the model's
VOCABULARIES = tuple(2**exponent for exponent in range(13, 20))

FORWARD, LOSS, BACKWARD, STEP = "forward", "loss", "backward", "step"
UPDATES = ("update", "all_gather", "reduce_scatter")  # what a step's last phase begins with
BETWEEN = {  # what a stage does between a model's events
    "copy out of what was gathered": "as a gathered unit is copied out",
    "keep a part of what was gathered": "as a part of a unit is kept",
    "copy to where it is reduced": "as gradients are copied to be reduced",
    "copy into a bucket": "as a gradient is copied into its bucket",
    "cast a gradient": "as a gradient is cast",
    "cast or move the gradients of shards": "as the shards' gradients are cast",
    "reduce_scatter": "as a reduce_scatter begins",
    "wait for a reduce_scatter": "as a reduce_scatter is awaited",
}
OUTSIDE = (
    "On the rank that has most, in a step that is not the first. Outside of the allocator, and on "
    "top: the CUDA context, 0.5 to 0.9 GiB, and NCCL's buffers."
)


@dataclass(frozen=True)
class Result:
    """The step's moments by phase, the fullest of all, and the phase that it is in."""

    phases: tuple[tuple[str, tuple[Peak, ...]], ...]
    peak: Peak
    phase: str
    blocks: str  # the name of the module that has the model's blocks
    gpu: specs.Gpu

    @property
    def margin(self) -> int:
        """Bytes that the peak leaves on the GPU; negative where it does not fit."""
        return self.gpu.memory_bytes - self.peak.bytes


def compute(
    model: str,
    micro_batch: int,
    seq_len: int,
    checkpointing: str,
    vocabulary: int,
    strategy: str,
    gpus: int,
    precision: str,
    gpu: str,
) -> Result:
    """One step of one micro-batch, with AdamW. `vocabulary`: tokens, or OWN.

    Raises CourseError where there is no such job, or nothing is known of its activations.
    """
    spec = specs.model(model)
    if vocabulary != OWN and not spec.is_bare:
        spec = replace(spec, vocab_size=vocabulary)
    recipe = specs.Recipe(
        precision, micro_batch=micro_batch, seq_len=seq_len, checkpointing=checkpointing
    )
    moments = ledger.timeline(spec, recipe, specs.Strategy(strategy, gpus))
    phases = in_phases(moments)
    fullest = max(moments, key=lambda moment: moment.bytes)
    phase = next(name for name, those in phases if any(x is fullest for x in those))
    return Result(phases, fullest, phase, spec.blocks, specs.gpu(gpu))


def in_phases(moments: Sequence[Peak]) -> tuple[tuple[str, tuple[Peak, ...]], ...]:
    """The moments of one micro-batch and its step, in order, by phase.

    Forward ends where it leaves the model; the loss, with its own backward, where backward reaches
    the model's output; backward where nothing is left but the update, and what it communicates.
    """
    phases: dict[str, list[Peak]] = {FORWARD: []}
    now, ended = FORWARD, False
    for moment in moments:
        if ended and moment.at in UPDATES:
            now = STEP
        phases.setdefault(now, []).append(moment)
        match moment.at:
            case "leave":
                now = LOSS
            case "reach":
                now = BACKWARD
            case "end":
                ended = True
    return tuple((name, tuple(those)) for name, those in phases.items())


def where(at: str, phase: str, blocks: str) -> str:
    """A moment in words: its event `at`, as a Peak has it, and its phase."""
    kind, _, name = at.partition(" ")
    if phase == LOSS:
        return "in the loss" if kind == "loss" else "in the loss's backward"
    if phase == STEP:
        return "in the optimizer's step" if kind == "update" else f"in the step's {kind}"
    name = _module(name, blocks)
    return {
        "enter": f"in forward, before {name}",
        "leave": f"in forward of {name}",
        "reach": f"in backward, before {name}",
        "through": f"in backward of {name}",
        "gradient": f"in backward of {name}",
        "end": "at the end of backward",
    }.get(kind, f"in {phase}, {BETWEEN.get(at, at)}")


def _module(name: str, blocks: str) -> str:
    """The name of a module, or of what has a weight: of a block it is the layer's number."""
    if not name:
        return "the model"
    if name.startswith(f"{blocks}."):
        return f"layer {name.removeprefix(f'{blocks}.').partition('.')[0]}"
    return name.removesuffix(".weight").removesuffix(".bias")


def draw(axes: Axes) -> Callable[[Result], None]:
    """The step from left to right; the function that is returned shows a result in it."""
    axes.figure.set_size_inches(7.4, 3.8)
    axes.figure.subplots_adjust(bottom=0.13, top=0.86)
    picture = StepMemory(axes)

    def update(result: Result) -> None:
        phases = [
            Phase(name, tuple(moment.by_category for moment in moments))
            for name, moments in result.phases
        ]
        picture.update(phases, _named(result), _capacity(result), result.gpu.memory_bytes)

    return update


def _named(result: Result) -> str:
    peak = result.peak
    return f"{ledger.gib(peak.bytes, digits=1)} {where(peak.at, result.phase, result.blocks)}"


def _capacity(result: Result) -> str:
    return f"{result.gpu.name}: {ledger.gib(result.gpu.memory_bytes, digits=0)}"


def words(result: Result) -> tuple[str, str]:
    """Alternative text, and in HTML: does it fit, what is the peak made of, and that as a table."""
    summary, most = _answer(result), _most(result)
    alt = (
        f"Stacked areas of the bytes on a rank over the moments of a step. At most: {most}. "
        f"Capacity of {_capacity(result)}. {summary}"
    )
    return alt, f"<p><strong>{escape(summary)}</strong></p>{_table(result)}"


def _answer(result: Result) -> str:
    spare = result.margin
    verdict = (
        f"fits {result.gpu.name}, {ledger.gib(spare)} to spare"
        if spare >= 0
        else f"does not fit {result.gpu.name}, {ledger.gib(-spare)} too much"
    )
    parts = ", ".join(
        f"{LABELS[name]} {ledger.gib(nbytes)}"
        for name, nbytes in _largest_first(result)
        if nbytes >= 2**20
    )
    return (
        f"The peak, {ledger.gib(result.peak.bytes)}, {verdict}. It comes "
        f"{where(result.peak.at, result.phase, result.blocks)}, and is made of {parts}."
    )


def _largest_first(result: Result) -> list[tuple[str, int]]:
    return sorted(result.peak.by_category.items(), key=lambda part: -part[1])


def _most(result: Result) -> str:
    return ", ".join(
        f"{name} {ledger.gib(max(moment.bytes for moment in moments))}"
        for name, moments in result.phases
    )


def _table(result: Result) -> str:
    """A row for each category at the peak, the largest first."""
    rows = "".join(
        _row(
            f'<span aria-hidden="true" style="color:{COLOURS[name]}">\N{BLACK SQUARE}</span> '
            f"{LABELS[name]}",
            nbytes,
            result.peak.bytes,
        )
        for name, nbytes in _largest_first(result)
    )
    rows += _row("<strong>together</strong>", result.peak.bytes, result.peak.bytes)
    heads = "".join(f"<th>{head}</th>" for head in ("at the peak", "GiB", "bytes", "of the peak"))
    return (
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p><small>{escape(OUTSIDE)}</small></p>"
    )


def _row(label: str, nbytes: int, of: int) -> str:
    cells = (f"{nbytes / 2**30:,.3f}", f"{nbytes:,}", f"{100 * nbytes / of:.1f}%")
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><td style="text-align:left">{label}</td>{numbers}</tr>'


def step_memory(
    model: str = "llama3-8b",
    strategy: str = "fsdp",
    gpus: int = 8,
    micro_batch: int = 1,
    seq_len: int = 8192,
    checkpointing: str = "none",
    vocabulary: int = OWN,
    precision: str = "fsdp-bf16",
    gpu: str = "h100-sxm-80",
) -> Explorer:
    """The explorer, starting from the given job, with AdamW: `gpus` are its ranks.

    `vocabulary` is a number of tokens, or 0 for the model's own. Sliders move over powers of two.
    """
    wide = {"style": {"description_width": "7em"}, "layout": {"width": "23em"}}

    def slider(name: str, values: Sequence[int], value: int, labels="{:,}".format):
        options = [(labels(each), each) for each in sorted({*values, value})]
        made = widgets.SelectionSlider(options=options, value=value, description=name, **wide)
        made.label = labels(value)  # on its first option it would have none
        return made

    def dropdown(name: str, values: Sequence[str], value: str):
        options = list(dict.fromkeys((*values, value)))
        return widgets.Dropdown(options=options, value=value, description=name, **wide)

    def tokens(count: int) -> str:
        return f"{count:,}" if count else "the model's"

    controls = {
        "micro_batch": slider("micro-batch", MICRO_BATCHES, micro_batch),
        "seq_len": slider("sequence", SEQUENCES, seq_len),
        "checkpointing": dropdown("checkpointing", specs.CHECKPOINTING, checkpointing),
        "vocabulary": slider("vocabulary", (OWN, *VOCABULARIES), vocabulary, tokens),
        "strategy": dropdown("stage", STAGES, strategy),
        "gpus": slider("ranks", POWERS, gpus),
        "model": dropdown("model", MODELS, model),
        "precision": dropdown("precision", tuple(specs.PRECISIONS), precision),
        "gpu": dropdown("gpu", specs.gpus(), gpu),
    }
    return Explorer(controls, compute, draw, words)
