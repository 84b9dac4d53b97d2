"""The memory of one step, moment by moment: stacked areas, the peak, and what the GPU has.

    timeline = StepMemory(axes)
    timeline.update(phases, "30.2 GiB in the loss's backward", "h100-sxm-80: 80 GiB", 80 * 2**30)

`phases` are the step's parts in order, each with its moments, {category: bytes}. Moments are drawn
at equal distances, for their order is known, and not their time; a phase of few moments is made
wide enough to be seen. Each phase's most is below its name, and the peak is marked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.ticker import MaxNLocator

from course_lib.ledger import CATEGORIES, COLOURS, LABELS

GIB = 2**30
POINTS = 240  # of a step: more cannot be told apart, and weigh on the notebook
LEAST = 60  # of a phase, if it has as many
NARROWEST = 0.09  # of a phase, as a part of the axis
ROOM = 1.2  # above the peak and the capacity, for their names
CHARACTER = 0.0125  # of a name, as a part of the axis
FAR, NEARER = 4, 1.6  # from so many peaks on a capacity is out of the picture, which ends there


@dataclass(frozen=True)
class Phase:
    """A part of a step: its name, and what is there at most up to each of its moments."""

    name: str
    moments: tuple[Mapping[str, int], ...]

    @property
    def most(self) -> int:
        """Bytes of its fullest moment."""
        return max(map(total, self.moments))


def total(moment: Mapping[str, int]) -> int:
    """Bytes of all categories together."""
    return sum(moment.values())


def thinned(phases: Sequence[Phase]) -> list[Phase]:
    """The same phases with about POINTS moments in all: of each stretch the fullest.

    So the peak stays, and so does the most of every phase. A phase of LEAST moments keeps them all,
    however many others have.
    """
    count = sum(len(phase.moments) for phase in phases)
    return [Phase(phase.name, tuple(_fullest(phase.moments, count))) for phase in phases]


def _fullest(moments: Sequence[Mapping[str, int]], count: int) -> Iterator[Mapping[str, int]]:
    """Of each stretch of a phase's moments; `count` are those of all phases."""
    every = math.ceil(len(moments) / max(POINTS * len(moments) / count, LEAST))
    for i in range(0, len(moments), every):
        yield max(moments[i : i + every], key=total)


def widths(phases: Sequence[Phase]) -> list[float]:
    """Each phase's part of the axis: by its moments, but none below NARROWEST."""
    counts = [len(phase.moments) for phase in phases]
    share = [count / sum(counts) for count in counts]
    narrow = [part < NARROWEST for part in share]
    left = 1 - NARROWEST * sum(narrow)
    wide = sum(part for part, thin in zip(share, narrow, strict=True) if not thin)
    return [
        NARROWEST if thin else left * part / wide for part, thin in zip(share, narrow, strict=True)
    ]


class StepMemory:
    """The picture; its artists are made once, and `update` moves them."""

    def __init__(self, axes: Axes):
        self._axes = axes
        # Each reaches down to 0, behind those before it, which halves the outlines.
        self._areas = {
            name: PolyCollection([], facecolors=[COLOURS[name]], linewidths=0, zorder=-place)
            for place, name in enumerate(CATEGORIES)
        }
        for area in self._areas.values():
            axes.add_collection(area, autolim=False)
        look = {"color": "black", "fontsize": 9}
        self._capacity = [
            axes.axhline(0, color="white", linewidth=2.4),  # so that it stands out from the dark
            axes.axhline(0, color="black", linestyle="--", linewidth=1.2),
        ]
        self._capacity_name = axes.text(0, 0, "", va="bottom", **look)
        self._capacity_name.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 1})
        (self._mark,) = axes.plot(
            [0], [0], "o", color="white", markeredgecolor="black", markersize=6
        )
        self._peak_name = axes.text(0, 0, "", va="bottom", fontweight="bold", **look)
        self._names: list = []
        below = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        self._edges = LineCollection([], colors="black", linewidths=0.8, **below)
        axes.add_collection(self._edges, autolim=False)
        axes.set_xlim(0, 1)
        axes.xaxis.set_visible(False)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        # As the axis's label it would be placed anew in every redraw, for as long as areas take.
        at = {"transform": axes.transAxes, "rotation": "vertical", "va": "center", "ha": "right"}
        axes.text(-0.07, 0.5, "GiB on a rank", **at)
        axes.spines[["top", "right"]].set_visible(False)
        _legend(axes)

    def update(self, phases: Sequence[Phase], peak: str, capacity: str, room: int) -> None:
        """Show `phases`; `peak` names the fullest moment, `capacity` the line at `room` bytes."""
        phases, parts = thinned(phases), widths(phases)
        ends = np.cumsum([0.0, *parts])
        edges = np.concatenate(
            [
                np.linspace(start, end, len(phase.moments), endpoint=False)
                for phase, start, end in zip(phases, ends, ends[1:], strict=False)
            ]
            + [[1.0]]
        )
        moments = [moment for phase in phases for moment in phase.moments]
        tops = self._stack(edges, moments)
        at = int(np.argmax(tops))
        line = room / GIB
        far = line > FAR * tops[at]
        if far:
            line = NEARER * tops[at]
            capacity += ", far above \N{UPWARDS ARROW}"
        for each in self._capacity:
            each.set_visible(not far)
        high = ROOM * max(tops[at], line)
        self._axes.set_ylim(0, high)
        self._name((edges[at] + edges[at + 1]) / 2, tops[at], peak, capacity, line, high)
        begins = np.cumsum([0, *(len(phase.moments) for phase in phases[:-1])])
        self._tell(phases, ends, [max(tops[i - 1 : i + 1], default=0) / high for i in begins])

    def _stack(self, edges: np.ndarray, moments: Sequence[Mapping[str, int]]) -> np.ndarray:
        """Move the areas; in GiB, how high they are at each moment."""
        below = np.zeros(len(moments))
        for category, area in self._areas.items():
            sizes = np.array([moment.get(category, 0) for moment in moments]) / GIB
            if sizes.any():
                below = below + sizes
                tops = np.where(sizes > 0, below, 0)  # or its edge would shine through
                area.set_verts([np.concatenate([[(0, 0)], _steps(edges, tops), [(1, 0)]])])
            else:
                area.set_verts([])
        return below

    def _name(self, x: float, y: float, peak: str, capacity: str, room: float, high: float) -> None:
        """Mark the peak and the capacity; their names side by side, and neither on a line."""
        longest = CHARACTER * len(peak)
        rightwards = x + longest < 1
        start = x if rightwards else x - longest
        line = high * 0.075  # of text
        crossed = y < room < y + 1.4 * line
        self._mark.set_data([x], [y])
        self._peak_name.set(
            x=x + (0.012 if rightwards else -0.012),
            y=(room if crossed else y) + 0.15 * line,
            text=peak,
            ha="left" if rightwards else "right",
        )
        for each in self._capacity:
            each.set_ydata([room, room])
        to_the_left = start > CHARACTER * len(capacity)
        self._capacity_name.set(
            x=0.006 if to_the_left else 1,
            y=room + 0.1 * line,
            text=capacity,
            ha="left" if to_the_left else "right",
        )

    def _tell(self, phases: Sequence[Phase], ends: np.ndarray, heights: Sequence[float]) -> None:
        """Below the axis: where each phase is, its name and its most. `heights`: of what is there
        as it begins, as parts of the axes."""
        below = {"transform": self._axes.get_xaxis_transform(), "clip_on": False}
        look = {"ha": "center", "va": "top", "fontsize": 9} | below
        while len(self._names) < len(phases):
            self._names.append(self._axes.text(0, -0.025, "", **look))
        for name in self._names[len(phases) :]:
            name.set_text("")
        for name, phase, *between in zip(self._names, phases, ends, ends[1:], strict=False):
            most = phase.most / GIB
            words = f"{phase.name}\n{most:,.{1 if most < 1000 else 0}f}"
            name.set(x=sum(between) / 2, text=words)
        inner = zip(ends[1:-1], heights[1:], strict=True)
        self._edges.set_segments([[(x, -0.13), (x, height)] for x, height in inner])


def _steps(edges: np.ndarray, heights: np.ndarray) -> np.ndarray:
    """Stairs as points [2 × steps, 2]; a stretch of equal heights is one step."""
    begins = np.concatenate([[True], heights[1:] != heights[:-1]])
    x = np.concatenate([edges[:-1][begins], edges[-1:]])
    return np.column_stack([np.repeat(x, 2)[1:-1], np.repeat(heights[begins], 2)])


def _legend(axes: Axes) -> None:
    """Squares and names in two rows; axes.legend would take a fifth of every redraw."""
    squares = []
    for place, category in enumerate(CATEGORIES):
        row, column = divmod(place, len(CATEGORIES) // 2)
        x, y = column / 4, 1.14 - 0.08 * row
        squares.append([(x, y), (x + 0.017, y), (x + 0.017, y + 0.04), (x, y + 0.04)])
        axes.text(x + 0.025, y, LABELS[category], transform=axes.transAxes, fontsize=9)
    look = {"facecolors": list(COLOURS.values()), "linewidths": 0, "clip_on": False}
    axes.add_collection(PolyCollection(squares, transform=axes.transAxes, **look), autolim=False)
