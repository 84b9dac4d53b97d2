"""A recording of FSDP's events as a picture: one rank, one clock, four views of it.

    made = picture(Story(events))
    made.image                       an <img>, drawn once
    made.marks(17), made.cells(17)   HTML of where the 18th event is on it, and of units' states

From top to bottom: what is on its way (communication), what the rank computes, the state of each
unit, and the bytes that all units together hold beyond their shards. A wait, which is exposed
communication, is white and hatched. Forward of a unit that has others inside of it spans theirs: it
lies behind them, paler and higher. A unit's row is as high as what it has: a line where it is
sharded, a bar where it is whole, half of one where it is resharded, hatched while it is gathered.

To step through events nothing is drawn anew: marks are laid on the picture, by HTML alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from course_lib.figures.image import image_html, new_figure
from course_lib.figures.life_cycle_story import (
    COMMUNICATION,
    GATHERING,
    NESTED,
    RESHARDED,
    SHARDED,
    WHOLE,
    Story,
    counts,
)
from course_lib.figures.timeline import FACES, tracks
from course_lib.ledger import COLOURS
from course_lib.specs import human

if TYPE_CHECKING:
    from course_lib.sharded.fsdp_events import Event  # loads torch, which explorers do without

PARAMETERS, BUFFER = COLOURS["parameters"], COLOURS["gather_buffers"]
KINDS = {  # kind: colour, colour of outline and hatching, hatching
    **{kind: FACES[kind] for kind in COMMUNICATION},
    "forward": ("#B8B8B8", "white", ""),
    "backward": ("#707070", "white", ""),
    "wait": ("white", "black", "//////"),
    "copy out": (BUFFER, "white", "||||"),
    "copy in": (COLOURS["reduce_buffers"], "white", "||||"),
    "to device": ("white", "black", "xxxx"),
    "to host": ("#D8D8D8", "black", "xxxx"),
}
OUTER = {"forward": "#E9E9E9", "backward": "#D2D2D2"}
STROKES = {"reshard": "black", "free": "#8C8C8C"}  # of no length: below the lane
STATES = {  # colour of the bar, of its hatching, hatching, height in a row that is 1 high
    SHARDED: (PARAMETERS, "white", "", 0.1),
    GATHERING: (BUFFER, "white", "//////", 0.8),
    WHOLE: (PARAMETERS, "white", "", 0.8),
    RESHARDED: (PARAMETERS, "white", "", 0.4),
}
CELLS = {  # the same as CSS
    SHARDED: f"linear-gradient(to top,{PARAMETERS} 10%,#FFF 10%)",
    GATHERING: f"repeating-linear-gradient(135deg,{BUFFER} 0 4px,#FFF 4px 6px)",
    WHOLE: PARAMETERS,
    RESHARDED: f"linear-gradient(to top,{PARAMETERS} 50%,#FFF 50%)",
}
MANY, DPI = 500, 200  # events from which on bars are pixels, so many to an inch: they weigh less
TRACK, COMPUTE, MEMORY = 0.24, 0.62, 1.0  # inches
ROW, ROWS = 0.2, 2.6  # of a unit; of all of them at most
ABOVE, BELOW, BETWEEN, LEFT, RIGHT, WIDTH = 0.5, 0.42, 0.12, 1.15, 0.12, 7.4


@dataclass(frozen=True)
class Picture:
    """The picture of `story`, and where things are on it, in parts of its width or height."""

    story: Story
    image: str  # HTML
    inches: tuple[float, float]
    rows: dict[int, tuple[float, float]]  # by id of an event: top and bottom
    over: float  # seconds at the right edge
    scale: tuple[float, float]  # of the curve: where 0 bytes are, and how far it is to one more

    def x(self, seconds: float) -> float:
        left, right = LEFT / WIDTH, 1 - RIGHT / WIDTH
        return left + (right - left) * seconds / self.over

    def box(self, index: int) -> tuple[float, float, float, float]:
        """Left, top, width and height of an event's bar."""
        event = self.story.events[index]
        left, right = self.x(event.start), self.x(self.story.end(event))
        top, bottom = self.rows[id(event)]
        return left, top, right - left, bottom - top

    def marks(self, index: int) -> str:
        """To be laid on the picture: a frame around the event, a line at its time, and a dot on the
        curve."""
        left, top, width, height = (f"{100 * part:.3f}%" for part in self.box(index))
        x = f"left:{100 * self.x(counts(self.story.events[index])):.3f}%"
        zero, each = self.scale
        y = f"top:{100 * (zero + each * self.story.held[index]):.3f}%"
        high = f"top:{100 * ABOVE / self.inches[1]:.2f}%;bottom:{100 * BELOW / self.inches[1]:.2f}%"
        glow = "position:absolute;box-sizing:content-box;box-shadow:0 0 0 1.5px #FFF"
        return self._sheet(
            f'<div style="{glow};{x};{high};margin-left:-1px;width:2px;background:#000"></div>'
            f'<div style="{glow};left:{left};top:{top};width:{width};height:{height};'
            'min-width:2px;margin:-3px;border:3px solid #000"></div>'
            f'<div style="{glow};{x};{y};margin:-6px;width:12px;height:12px;border-radius:50%;'
            'background:#000"></div>'
        )

    def cells(self, index: int) -> str:
        """A cell for each unit: its name, its state, and the bytes that it holds."""
        now = self.story.events[index].unit
        made = []
        for unit, event in self.story.latest(index).items():
            state, held = (event.state, event.held) if event else (SHARDED, 0)
            frame = "2px solid #000" if unit == now else "2px solid #CCC"
            name = escape(self.story.name(unit))
            made.append(
                f'<div style="width:7em;margin:2px;border:{frame};font-size:11px;line-height:1.35">'
                f'<div style="height:14px;background:{CELLS[state]}"></div>'
                f'<div style="padding:0 3px;white-space:nowrap;overflow:hidden" title="{name}">'
                f"<strong>{name}</strong> <br>{state} <br>{human(held, 1)} </div></div>"
            )
        return f'<div style="display:flex;flex-wrap:wrap">{"".join(made)}</div>'

    def with_marks(self, index: int) -> str:
        """HTML of the picture and its marks. Where styles are taken out, marks are not to be seen,
        and nothing else is lost."""
        above = f'<div style="position:absolute;inset:0">{self.marks(index)}</div>'
        return self._sheet(self.image + above)

    def _sheet(self, inside: str) -> str:
        """As large as the picture, wherever that is made narrower."""
        wide, high = self.inches
        size = f"width:{72 * wide:g}pt;max-width:100%;aspect-ratio:{wide:g}/{high:g}"
        return f'<div style="position:relative;{size}">{inside}</div>'


def picture(story: Story, over: float | None = None, most: int | None = None) -> Picture:
    """Draw `story`. The axes go to `over` seconds and `most` bytes, by default its own."""
    over, most = over or story.over or 1e-6, most or max(story.held) or 1
    lanes = tracks([event for event in story.events if event.kind in COMMUNICATION])
    heights = [
        TRACK * max(len(lanes), 1) + COMPUTE,
        min(ROW * len(story.units), ROWS),
        MEMORY,
    ]
    total = ABOVE + sum(heights) + 2 * BETWEEN + BELOW
    figure = new_figure(WIDTH, total)
    figure.dpi = DPI
    axes, bottom = [], total - ABOVE
    for height in heights:
        bottom -= height
        width = WIDTH - LEFT - RIGHT
        at = (LEFT / WIDTH, bottom / total, width / WIDTH, height / total)
        axes.append(figure.add_axes(at))
        axes[-1].set_xlim(0, 1e3 * over)
        axes[-1].spines[["top", "right"]].set_visible(False)
        bottom -= BETWEEN
    for upper in axes[:2]:
        upper.tick_params(labelbottom=False, length=0)
        upper.spines[["left"]].set_visible(False)
    rows = _lanes(axes[0], story, lanes)
    _states(axes[1], story)
    zero, top = _memory(axes[2], story, most)
    _legend(figure, story)
    if _thin(story) < 1:
        for each in axes:
            for drawn in (*each.patches, *each.collections, *each.lines):
                drawn.set_rasterized(True)
    places = {
        event: tuple((ABOVE + inches) / total for inches in between)
        for event, between in rows.items()
    }
    y = [(total - BELOW - part * MEMORY) / total for part in (zero, top)]
    image = image_html(figure, story.alt())
    return Picture(story, image, (WIDTH, total), places, over, (y[0], (y[1] - y[0]) / most))


def _thin(story: Story) -> float:
    """Outlines of many bars must be thinner than the bars."""
    return min(1.0, MANY / len(story.events))


def _lanes(axes: Axes, story: Story, lanes: list[list[Event]]) -> dict[int, tuple[float, float]]:
    """Draw communication and compute, in inches from the top; where each event is, by its id."""
    below = TRACK * max(len(lanes), 1)
    axes.set_ylim(below + COMPUTE, 0)
    axes.set_yticks([below / 2, below + COMPUTE / 2], ["communication", "compute"], fontsize=9)
    axes.axhline(below, color="#D0D0D0", linewidth=0.6)
    rows = {
        id(event): (TRACK * (row + 0.08), TRACK * (row + 0.92))
        for row, lane in enumerate(lanes)
        for event in lane
    }
    for event in story.events:
        if event.kind in STROKES:
            rows[id(event)] = (below + 0.88 * COMPUTE, below + 0.99 * COMPUTE)
        elif id(event) not in rows:
            inset = 0.1 * min(story.depths.get(id(event), 1), 3)
            rows[id(event)] = (below + (0.06 + inset) * COMPUTE, below + (0.85 - inset) * COMPUTE)

    def draw(events: Iterable[Event], kind: str, **look) -> None:
        spans = [(e.start, story.end(e), *rows[id(e)]) for e in events if e.kind == kind]
        _bars(axes, spans, *KINDS.get(kind, (STROKES.get(kind, "black"), "black", "")), **look)

    for kind in NESTED:
        depth = story.depths.get
        outer = [event for event in story.events if id(event) in story.outer]
        for event in sorted(outer, key=lambda event: depth(id(event))):
            look = {"facecolor": OUTER[kind], "edgecolor": KINDS["backward"][0]}
            draw([event], kind, linewidth=0.6, **look)
    inner = [event for event in story.events if id(event) not in story.outer]
    for kind in [*KINDS, *STROKES]:
        outlined = kind == "wait" or kind in STROKES
        draw(inner, kind, linewidth=0.6 * _thin(story) if outlined else 0)
    return rows


def _states(axes: Axes, story: Story) -> None:
    """Draw a row for each unit; where there are many, not each has its name beside it."""
    axes.set_ylim(len(story.units) - 0.5, -0.5)
    every = -(-len(story.units) * 0.14 // ROWS) if len(story.units) * ROW > ROWS else 1
    named = range(0, len(story.units), int(every))
    names = [story.name(story.units[row]) for row in named]
    axes.set_yticks(named, [x if len(x) < 17 else f"…{x[-15:]}" for x in names], fontsize=8)
    bars = {state: [] for state in STATES}
    for row, unit in enumerate(story.units):
        for state, start, end in story.states(unit):
            bars[state].append((start, end, row + 0.4 - STATES[state][3], row + 0.4))
    for state, spans in bars.items():
        _bars(axes, spans, *STATES[state][:3])


def _memory(axes: Axes, story: Story, most: int) -> tuple[float, float]:
    """Draw the curve; in parts of the axes' height, where 0 bytes and where `most` are."""
    power = 0 if most < 2**10 else 1 if most < 2**20 else 2 if most < 2**30 else 3
    unit = 1024**power
    x = [0.0, *(1e3 * counts(event) for event in story.events), 1e3 * story.over]
    y = [0.0, *(held / unit for held in story.held), story.held[-1] / unit]
    axes.fill_between(x, y, step="post", color="#D8D8D8", linewidth=0)
    axes.plot(x, y, drawstyle="steps-post", color="black", linewidth=_thin(story))
    axes.set_ylim(0, 1.25 * most / unit)
    axes.set_ylabel(f"held, {('B', 'KiB', 'MiB', 'GiB')[power]}", fontsize=9)
    axes.set_xlabel("ms since the recording began", fontsize=9)
    axes.tick_params(labelsize=8)
    peak = story.events[story.peak]
    at = 1e3 * counts(peak)
    right = at > 0.6 * axes.get_xlim()[1]
    axes.plot(at, max(y), "o", color="white", markeredgecolor="black", markersize=5)
    axes.annotate(
        f"peak {human(max(story.held))}",
        (at, max(y)),
        xytext=(-6 if right else 6, 3),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8.5,
    )
    return 0.0, 1 / 1.25


def _legend(figure: Figure, story: Story) -> None:
    """A square for each kind and state there is; those of states are as high as in their rows."""
    kinds = {event.kind for event in story.events}
    states = {state for unit in story.units for state, *_ in story.states(unit)}
    looks = {kind: (*look, 1.0) for kind, look in KINDS.items() if kind in kinds}
    looks |= {kind: (face, "white", "", 1.0) for kind, face in STROKES.items() if kind in kinds}
    looks |= {state: look for state, look in STATES.items() if state in states}
    handles = [
        Patch(facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.6, label=name)
        for name, (face, edge, hatch, _) in looks.items()
    ]
    look = {"ncols": 7, "loc": "upper center", "frameon": False, "fontsize": 8, "handleheight": 1}
    legend = figure.legend(handles=handles, borderaxespad=0.1, columnspacing=1.3, **look)
    for square, (*_, height) in zip(legend.get_patches(), looks.values(), strict=True):
        square.set_height(max(height, 0.25) * square.get_height())


def _bars(axes: Axes, spans: list, face: str, edge: str, hatch: str, **look) -> None:
    """All spans, each (start, end, top, bottom), as one patch: they weigh a fifth of many."""
    corners = []
    for start, end, top, bottom in spans:
        a, b = 1e3 * start, 1e3 * end
        corners += [(a, top), (b, top), (b, bottom), (a, bottom), (a, top)]
    if corners:
        codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(spans)
        style = {"facecolor": face, "edgecolor": edge, "hatch": hatch, "linewidth": 0} | look
        axes.add_artist(PathPatch(Path(corners, codes), **style))  # limits are set: none to find
