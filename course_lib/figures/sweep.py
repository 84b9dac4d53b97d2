"""A sweep: one setting of FSDP turned from end to end, and what each value costs in bytes and time.

    sweep("a unit is", [Setting("the model", peak, seconds, exposed, own), ...], "what it shows")

Two panels share the settings. On the left the peak of a rank, measured, and as the ledger predicts
it; on the right the time of a step on a slow link, of which the hatched part is *exposed*:
something is on the link, and this rank computes nothing. A stroke marks the time on the machine's
own link.

`lanes` reads communication and compute out of a recording (see sharded.fsdp_events), `uncovered`
gives the seconds of one that the other does not cover.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from matplotlib.axes import Axes

from course_lib.errors import CourseError
from course_lib.figures.image import image_html, new_figure
from course_lib.figures.ladder import duration
from course_lib.ledger import COLOURS
from course_lib.specs import human

MIB = 2**20
GREY = "#8C8C8C"  # time, no memory at all
COMMUNICATION = ("all_gather", "reduce_scatter", "all_reduce")
COMPUTE = ("forward", "backward", "copy out", "copy in", "to device", "to host")
Spans = Sequence[tuple[float, float]]  # each from its start to its end


@dataclass(frozen=True)
class Setting:
    """One value of what is turned, on one rank, in bytes and seconds.

    `peak` is measured and `predicted` the ledger's, None where there is none; `seconds` is a step
    on the slow link, `exposed` a part of it, and `own` a step on the machine's own link.
    """

    name: str
    peak: int
    seconds: float
    exposed: float
    own: float
    predicted: int | None = None


@dataclass(frozen=True, repr=False)
class Sweep:
    """Draws itself: in a notebook the figure and its table, in a terminal the table."""

    turned: str
    settings: tuple[Setting, ...]
    alt: str

    def __repr__(self) -> str:
        rows = [_heads(self), *map(_cells, self.settings)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        )

    def _repr_html_(self) -> str:
        figure = new_figure(height=3.2)
        figure.subplots_adjust(left=0.09, right=0.98, bottom=0.2, top=0.84, wspace=0.22)
        memory, time = figure.subplots(1, 2)
        _draw_memory(memory, self.settings)
        _draw_time(time, self.settings)
        for axes in (memory, time):
            names = [_in_lines(x.name, 40 // len(self.settings)) for x in self.settings]
            axes.set_xticks(range(len(names)), names, fontsize=8)
            axes.set_xlim(-0.6, len(names) - 0.4)
            axes.spines[["top", "right"]].set_visible(False)
        alt = f"{self.alt} {_words(self)}"
        head = _row(_heads(self), "th")
        body = "".join(_row(_cells(setting), "td") for setting in self.settings)
        return (
            f'<figure style="margin:0">{image_html(figure, alt)}</figure>'
            f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        )


def sweep(turned: str, settings: Iterable[Setting], alt: str) -> Sweep:
    """The sweep of what is `turned`. `alt`: what the picture shows; numbers are added.

    Errors: CourseError where there is no setting, and where more is exposed than a step takes.
    """
    settings = tuple(settings)
    if not settings:
        raise CourseError("There is nothing to draw: give a list of Setting, one for each value.")
    for setting in settings:
        if not 0 <= setting.exposed <= setting.seconds:
            raise CourseError(
                f"{setting.name}: {setting.exposed} of {setting.seconds} seconds are exposed, and "
                "that is a part of a step: give both of one step, or of the same median."
            )
    return Sweep(turned, settings, alt)


def lanes(events: Iterable) -> tuple[Spans, Spans]:
    """Communication and compute of a recording: while it waits for a unit, a rank computes not."""
    spans = [(e.kind, (e.start, e.start if e.end is None else e.end)) for e in events]
    sent, computed, waits = (
        [span for kind, span in spans if kind in kinds]
        for kinds in (COMMUNICATION, COMPUTE, ("wait",))
    )
    return sent, _pieces(computed, waits)


def uncovered(spans: Spans, cover: Spans) -> float:
    """Seconds in which there is some of `spans`, and none of `cover`."""
    return sum(end - start for start, end in _pieces(spans, cover))


def _pieces(spans: Spans, cover: Spans) -> list[tuple[float, float]]:
    """What `cover` leaves of `spans`, cut wherever one of either begins or ends."""
    one, other = _joined(spans), _joined(cover)
    cuts = sorted({time for span in (*one, *other) for time in span})
    return [
        (start, end)
        for start, end in pairwise(cuts)
        if _within(one, start, end) and not _within(other, start, end)
    ]


def _joined(spans: Spans) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _within(spans: Spans, start: float, end: float) -> bool:
    return any(a <= start and end <= b for a, b in spans)


def _draw_memory(axes: Axes, settings: Sequence[Setting]) -> None:
    peaks = [setting.peak / MIB for setting in settings]
    look = {"color": COLOURS["parameters"], "linewidth": 1.6, "markersize": 7}
    axes.plot(range(len(peaks)), peaks, "o-", label="peak, measured", **look)
    known = [(x, s.predicted / MIB) for x, s in enumerate(settings) if s.predicted is not None]
    if known:
        look = {"markersize": 12, "fillstyle": "none", "color": "black", "linestyle": ""}
        axes.plot(*zip(*known, strict=True), marker="s", label="predicted", **look)
    axes.set_ylabel("MiB on a rank")
    axes.set_ylim(0, 1.15 * max(peaks))
    _legend(axes)


def _draw_time(axes: Axes, settings: Sequence[Setting]) -> None:
    milliseconds = [1e3 * (s.seconds - s.exposed) for s in settings]
    exposed = [1e3 * s.exposed for s in settings]
    at = range(len(settings))
    look = {"width": 0.66, "edgecolor": "black", "linewidth": 0.8}
    axes.bar(at, milliseconds, color=GREY, label="the rest", **look)
    white = {"color": "white", "hatch": "//////", "label": "exposed", **look}
    axes.bar(at, exposed, bottom=milliseconds, **white)
    own = [1e3 * s.own for s in settings]
    look = {"colors": COLOURS["gradients"], "linewidth": 2.6, "label": "own link"}
    axes.hlines(own, [x - 0.42 for x in at], [x + 0.42 for x in at], **look)
    axes.set_ylabel("a step on the slow link, ms")
    axes.set_ylim(0, 1.08e3 * max(max(s.seconds, s.own) for s in settings))
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, frameon=False, fontsize=8.5,
        handlelength=1.3, columnspacing=1.0, borderaxespad=0.2,
    )  # fmt: skip


def _in_lines(name: str, letters: int) -> str:
    """Broken between words, such that a line has so many letters, or is one word."""
    lines = [""]
    for word in name.split():
        if lines[-1] and len(lines[-1]) + len(word) > letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _heads(sweep: Sweep) -> tuple[str, ...]:
    return (
        sweep.turned, "peak", "predicted", "step, slow link", "of it exposed", "step, own link"
    )  # fmt: skip


def _cells(setting: Setting) -> tuple[str, ...]:
    predicted = "–" if setting.predicted is None else human(setting.predicted)
    times = map(duration, (setting.seconds, setting.exposed, setting.own))
    return (setting.name, human(setting.peak), predicted, *times)


def _words(sweep: Sweep) -> str:
    each = (
        f"{s.name}: peak {human(s.peak)}, step {duration(s.seconds)}, of it {duration(s.exposed)} "
        "exposed"
        for s in sweep.settings
    )
    return f"Where {sweep.turned}: {'; '.join(each)}."


def _row(texts: Sequence[str], tag: str) -> str:
    name, *numbers = map(escape, texts)
    right = "".join(f'<{tag} style="text-align:right">{x}</{tag}>' for x in numbers)
    return f'<tr><{tag} style="text-align:left">{name}</{tag}>{right}</tr>'
