"""Stacked bars of bytes: a bar a strategy, a colour a category, the GPU's capacity as a line."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from course_lib.ledger import COLOURS, LABELS

GIB = 2**30
Bytes = Mapping[str, int]  # category: bytes


class StackedBars:
    """Bars from top to bottom, in GiB, one for each label; `update` moves them.

    The artists are made once, so that a redraw can follow a slider. The chosen bar has a frame and
    each ends with its total. The categories' colours differ in lightness too, for grey print.
    """

    def __init__(self, axes: Axes, labels: Sequence[str], categories: Sequence[str]):
        self._axes, self._rows = axes, range(len(labels))
        zeros = [0.0] * len(labels)
        self._segments = {
            category: axes.barh(self._rows, zeros, height=0.62, color=COLOURS[category])
            for category in categories
        }
        (self._frame,) = axes.barh(
            [0], [0], height=0.74, fill=False, edgecolor="black", linewidth=1.4
        )
        self._totals = [axes.text(0, row, "", va="center", fontsize=9) for row in self._rows]
        self._capacity = axes.axvline(0, color="black", linestyle="--", linewidth=1.2)
        self._capacity_text = axes.text(0, -0.62, "", va="bottom", fontsize=9)
        axes.set_yticks(self._rows, labels)
        axes.set_ylim(len(labels) - 0.5, -0.65)
        axes.tick_params(axis="y", left=False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("GiB on each rank")
        axes.spines[["top", "right"]].set_visible(False)
        for column, category in enumerate(categories):
            _legend_entry(axes, column / len(categories), category)

    def update(self, bars: Sequence[Bytes], chosen: int, capacity: int, name: str) -> None:
        """Show `bars`, one for each label, an empty one where there is nothing to show.

        chosen: the framed bar's row. capacity: the GPU's bytes. name: what to call the line.
        """
        totals = [sum(bar.values()) / GIB for bar in bars]
        widest = max(capacity / GIB, *totals)
        for row, (bar, total) in enumerate(zip(bars, totals, strict=True)):
            self._move(row, bar)
            text = self._totals[row]
            text.set(x=total + widest * 0.01, text=f"{total:,.1f}" if bar else "nothing to shard")
            text.set_fontweight("bold" if row == chosen else "normal")
        self._frame.set(y=chosen - 0.37, width=totals[chosen])
        self._capacity.set_xdata([capacity / GIB] * 2)
        self._capacity_text.set(x=capacity / GIB, text=f" {name}")
        self._axes.set_xlim(0, widest * 1.14)

    def _move(self, row: int, bar: Bytes) -> None:
        left = 0.0
        for category, segments in self._segments.items():
            width = bar.get(category, 0) / GIB
            segments[row].set(x=left, width=width)
            left += width


def _legend_entry(axes: Axes, x: float, category: str) -> None:
    """A coloured square and its name; axes.legend would take a fifth of every redraw."""
    at = {"transform": axes.transAxes, "fontsize": 9}
    axes.text(x, 1.1, "\N{BLACK SQUARE}", color=COLOURS[category], **at)
    axes.text(x + 0.025, 1.1, LABELS[category], **at)
