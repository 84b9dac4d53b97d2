"""Lanes: what works when. A lane for each worker, from top to bottom, its spans along one clock.

Neighbouring spans have two shades of the lane's colour in turn, so that many thin ones can be told
apart without outlines.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

Spans = Sequence[tuple[float, float]]  # each from its start to its end

HEIGHT = 0.62  # of a lane, whose rows are 1 apart
PALER = 0.45  # how far the second shade is on its way to white


class Lanes:
    """`colours` maps each lane's name to its colour. `update` moves the spans.

    A span may be marked: it is then hatched, with words beside it.
    """

    def __init__(self, axes: Axes, colours: Mapping[str, str]):
        self._axes, self._names = axes, list(colours)
        self._spans = [
            PolyCollection([], facecolors=[colour, _paler(colour)], linewidths=0)
            for colour in colours.values()
        ]
        for spans in self._spans:
            axes.add_collection(spans)
        self._mark = Rectangle(
            (0, 0), 0, HEIGHT, fill=False, hatch="////", edgecolor="black", linewidth=1.2
        )
        axes.add_patch(self._mark)
        self._words = axes.text(0, 0, "", va="bottom", ha="right", fontsize=9, fontweight="bold")
        axes.set_yticks(range(len(colours)), self._names)
        axes.set_ylim(len(colours) - 0.5, -0.5)
        axes.tick_params(axis="y", left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)

    def update(
        self, lanes: Mapping[str, Spans], marked: tuple[float, float], lane: str, words: str
    ) -> None:
        """Show `lanes`, name by name, and mark a span of `lane`; one of no length marks nothing."""
        for row, (name, spans) in enumerate(zip(self._names, self._spans, strict=True)):
            top, bottom = row - HEIGHT / 2, row + HEIGHT / 2
            spans.set_verts(
                [((a, top), (b, top), (b, bottom), (a, bottom)) for a, b in lanes[name]]
            )
        start, end = marked
        row = self._names.index(lane)
        self._mark.set(xy=(start, row - HEIGHT / 2), width=end - start, visible=end > start)
        latest = max(end, *(b for spans in lanes.values() for _, b in spans))
        self._words.set(x=latest, y=row - HEIGHT / 2 - 0.04, text=words)
        self._axes.set_xlim(0, latest)


def _paler(colour: str) -> tuple[float, ...]:
    return tuple(part + (1 - part) * PALER for part in to_rgb(colour))
