"""The ladder of sharding as one figure and one table: what each rung holds, moves and takes.

    ladder([Rung("ddp", parameters, gradients, optimizer_states, peak, moved, seconds), ...])

A rung is a row across three panels: the bytes that a rank holds after a step, with a mark at the
peak within it; the bytes that it moves in a step; the time. Going down a rung, look at what becomes
shorter and what becomes longer. `Panels` draws them, for measured rungs and for predicted ones.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.errors import CourseError
from course_lib.figures.image import image_html, new_figure
from course_lib.ledger import COLOURS, LABELS
from course_lib.specs import MODEL_STATES, human
from course_lib.specs.checking import whole
from course_lib.specs.units import BINARY

HATCHES = {"parameters": "", "gradients": "////", "optimizer_states": "xxx"}  # for grey print
BYTES = tuple((1024**power, unit) for power, unit in enumerate(BINARY))
SECONDS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
STEP = "a step takes"
CHARACTERS = (46, 20, 20)  # of a number, side by side, that would fill a panel
HEIGHT, FRAME = 0.62, 0.78  # of a bar and of the chosen one's frame, whose rows are 1 apart


@dataclass(frozen=True)
class Rung:
    """One rung, on the rank that has most, in bytes and seconds.

    `parameters`, `gradients` and `optimizer_states` are what it holds after a step, `peak` the most
    that lives at any moment of one, activations and buffers included; None where nobody knows.
    `moved` is what passes through the rank in a step, in each direction, and `seconds` its time.
    """

    name: str
    parameters: int
    gradients: int
    optimizer_states: int
    peak: int | None
    moved: int
    seconds: float

    def __post_init__(self) -> None:
        known = () if self.peak is None else ("peak",)
        for field in (*MODEL_STATES, *known, "moved"):
            whole(f"{field} of {self.name}", getattr(self, field), least=0)
        if not 0 <= self.seconds < float("inf"):
            raise CourseError(
                f"seconds of {self.name} is {self.seconds!r}: give the time of a step, 0 or more."
            )

    @property
    def held(self) -> int:
        """Bytes of all model states."""
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Bytes of each category of model states, in the order in which they are stacked."""
        return {category: getattr(self, category) for category in MODEL_STATES}


@dataclass(frozen=True)
class Ladder:
    """Draws itself: in a notebook the figure and its table, in a terminal the table."""

    rungs: tuple[Rung, ...]

    def __repr__(self) -> str:
        rows = [heads(self.rungs), *(cells(rung, self.rungs) for rung in self.rungs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *numbers in rows:
            right = [x.rjust(width) for x, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        figure = new_figure(height=1.05 + 0.42 * len(self.rungs))
        panels = Panels(figure, [rung.name for rung in self.rungs], STEP)
        panels.update(self.rungs)
        rows = "".join(_row(cells(rung, self.rungs), "td") for rung in self.rungs)
        return (
            f'<figure style="margin:0">{image_html(figure, words(self.rungs))}</figure>'
            f"<table><thead>{_row(heads(self.rungs), 'th')}</thead><tbody>{rows}</tbody></table>"
        )


def ladder(rungs: Sequence[Rung]) -> Ladder:
    """The ladder of `rungs`, from the first to the last; CourseError where there is none."""
    if not rungs:
        raise CourseError(
            "There is no rung to draw: give a list of Rung, one for each stage measured."
        )
    return Ladder(tuple(rungs))


def heads(rungs: Sequence[Rung]) -> tuple[str, ...]:
    """What the columns of the table are; the peak is one where any rung knows it."""
    peak = ("peak",) if _peaks(rungs) else ()
    labels = (LABELS[category] for category in MODEL_STATES)
    return ("on each rank", *labels, "together", *peak, "moved a step", STEP)


def cells(rung: Rung, rungs: Sequence[Rung]) -> tuple[str, ...]:
    """A rung's row of the table of `rungs`."""
    peak = ("" if rung.peak is None else human(rung.peak),) if _peaks(rungs) else ()
    states = map(human, rung.by_category().values())
    return (rung.name, *states, human(rung.held), *peak, human(rung.moved), duration(rung.seconds))


def words(rungs: Sequence[Rung], time: str = STEP) -> str:
    """Alternative text: what the three panels show. `time`: what the third one's title is."""
    held = ", ".join(f"{x.name} {human(x.held)}{_peak_of(x)}" for x in rungs)
    moved = ", ".join(f"{x.name} {human(x.moved)}" for x in rungs)
    taken = ", ".join(f"{x.name} {duration(x.seconds)}" for x in rungs)
    return (
        f"Three panels of bars, a row for each rung. Held by each rank: {held}. "
        f"Moved in a step: {moved}. {time.capitalize()}: {taken}."
    )


def duration(seconds: float) -> str:
    """`duration(0.0123)` is '12.3 ms': three digits and a unit."""
    return _with_unit((seconds,), SECONDS)


class Panels:
    """Three panels side by side, made once; `update` moves the artists.

    `names` are the rungs', from top to bottom; `time` is the title of the third panel.
    """

    def __init__(self, figure: Figure, names: Sequence[str], time: str):
        above, below = 0.5 / figure.get_figheight(), 0.4 / figure.get_figheight()
        left = (0.2 + 0.085 * max(map(len, names))) / figure.get_figwidth()
        figure.subplots_adjust(left=left, right=0.99, bottom=below, top=1 - above, wspace=0.08)
        self._axes = figure.subplots(1, 3, width_ratios=(2.3, 1, 1))
        self._rows = range(len(names))
        titles = ("held by each rank", "moved in a step", time)
        for axes, title in zip(self._axes, titles, strict=True):
            axes.set_title(title, loc="left", fontsize=9, y=1, pad=16)  # a y saves a search for it
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.xaxis.set_visible(False)
            axes.yaxis.set_visible(False)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
        memory, *others = self._axes
        memory.yaxis.set_visible(True)
        memory.set_yticks(self._rows, names)
        memory.tick_params(axis="y", left=False)
        self._stacks = {
            category: _bars(memory, len(names), color=COLOURS[category], hatch=HATCHES[category])
            for category in MODEL_STATES
        }
        self._others = [_bars(axes, len(names), color="#8C8C8C") for axes in others]
        self._peaks = [memory.plot([], [], color="black", linewidth=1.4)[0] for _ in names]
        self._numbers = [
            [axes.text(0, row, "", va="center", fontsize=8.5) for row in self._rows]
            for axes in self._axes
        ]
        (self._frame,) = memory.barh(0, 0, FRAME, fill=False, edgecolor="black", linewidth=1.4)
        self._capacity = memory.axvline(0, color="black", linestyle="--", linewidth=1.2)
        # The line's name, between the title and the bars.
        across = memory.get_xaxis_transform()
        self._capacity_name = memory.text(0, 1, "", va="bottom", fontsize=8.5, transform=across)
        self._legend(memory, 0.23 / figure.get_figheight() / (1 - above - below))

    def update(
        self,
        rungs: Sequence[Rung],
        chosen: int | None = None,
        capacity: tuple[str, int] | None = None,
    ) -> None:
        """Show `rungs`: frame the row of the `chosen` one, draw `capacity`, a name and bytes."""
        moved, seconds = [rung.moved for rung in rungs], [rung.seconds for rung in rungs]
        for bars, values in zip(self._others, (moved, seconds), strict=True):
            for bar, value in zip(bars, values, strict=True):
                bar.set_width(value)
        for row, rung in enumerate(rungs):
            self._stack(row, rung)
        ends = [max(rung.held, rung.peak or 0) for rung in rungs]
        least = capacity[1] if capacity else 0
        self._label(0, ends, map(_held_and_peak, rungs), chosen, least)
        self._label(1, moved, (_with_unit((x,), BYTES) for x in moved), chosen)
        self._label(2, seconds, map(duration, seconds), chosen)
        self._frame.set_visible(chosen is not None)
        if chosen is not None:
            self._frame.set(y=chosen - FRAME / 2, width=rungs[chosen].held)
        self._show_capacity(capacity)

    def _stack(self, row: int, rung: Rung) -> None:
        left = 0
        for category, nbytes in rung.by_category().items():
            self._stacks[category][row].set(x=left, width=nbytes)
            left += nbytes
        self._peaks[row].set_data(*_mark(left, rung.peak or left, row))

    def _label(
        self, panel: int, ends: Sequence[float], texts: Iterable[str], chosen: int | None, least=0
    ) -> None:
        """Write a panel's numbers where its bars end, and give it room for them."""
        texts = list(texts)
        bars = 1 - (2 + max(map(len, texts))) / CHARACTERS[panel]  # their part of the panel
        width = max(*ends, least) / bars or 1
        self._axes[panel].set_xlim(0, width)
        for row, (number, end, text) in enumerate(
            zip(self._numbers[panel], ends, texts, strict=True)
        ):
            number.set(x=end + 0.6 * width / CHARACTERS[panel], text=text)
            number.set_fontweight("bold" if row == chosen else "normal")

    def _show_capacity(self, capacity: tuple[str, int] | None) -> None:
        for artist in (self._capacity, self._capacity_name):
            artist.set_visible(capacity is not None)
        if capacity is not None:
            name, nbytes = capacity
            right = nbytes > 0.5 * self._axes[0].get_xlim()[1]
            self._capacity.set_xdata([nbytes, nbytes])
            self._capacity_name.set(x=nbytes, text=name, ha="right" if right else "left")

    def _legend(self, axes: Axes, below: float) -> None:
        """Squares and names below the bars; axes.legend would take a fifth of every redraw."""
        at = {"transform": axes.transAxes, "clip_on": False}
        for x, category in zip((0, 0.28, 0.52), MODEL_STATES, strict=True):
            look = {"facecolor": COLOURS[category], "hatch": HATCHES[category]}
            square = Rectangle((x, -below), 0.035, 0.6 * below, edgecolor="white", lw=0, **look)
            axes.add_patch(square)
            square.set(**at)
            axes.text(x + 0.045, -0.7 * below, LABELS[category], va="center", fontsize=8.5, **at)


def _bars(axes: Axes, rows: int, **look):
    return axes.barh(range(rows), [0.0] * rows, HEIGHT, edgecolor="white", linewidth=0, **look)


def _mark(end: float, peak: float, row: int) -> tuple[list[float], list[float]]:
    """From a bar's end to the peak, and a stroke across there; nothing where they are the same."""
    if peak == end:
        return [], []
    return [end, peak, peak, peak], [row, row, row - HEIGHT / 3, row + HEIGHT / 3]


def _peaks(rungs: Sequence[Rung]) -> bool:
    return any(rung.peak is not None for rung in rungs)


def _peak_of(rung: Rung) -> str:
    return "" if rung.peak is None else f" (peak {human(rung.peak)})"


def _held_and_peak(rung: Rung) -> str:
    return _with_unit((rung.held,) if rung.peak is None else (rung.held, rung.peak), BYTES)


def _with_unit(values: Sequence[float], units: Sequence[tuple[float, str]]) -> str:
    """A value, or a value and its peak, in the largest unit of which there is at least one."""
    scale, unit = next((unit for unit in reversed(units) if max(values) >= unit[0]), units[0])
    return f"{', peak '.join(_three_digits(value / scale) for value in values)} {unit}"


def _three_digits(number: float) -> str:
    """`_three_digits(0.01234)` is '0.0123'; whole numbers are not shortened."""
    if not number:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{min(digits, 6)}f}"


def _row(texts: Sequence[str], tag: str) -> str:
    name, *numbers = map(escape, texts)
    right = "".join(f'<{tag} style="text-align:right">{x}</{tag}>' for x in numbers)
    return f'<tr><{tag} style="text-align:left">{name}</{tag}>{right}</tr>'
