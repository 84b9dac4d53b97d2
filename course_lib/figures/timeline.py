"""The collective log as a timeline: a lane for each rank, a bar for each collective.

    timeline(ranks.run(train).log)

A bar reaches from when the rank issued the collective to when it was done. What a rank has under
way at the same time lies in the same lane, one above the other. Colour and hatching tell the kind:
all_gather and reduce_scatter have the colours of the buffers that they fill, and all_reduce, which
is both, has both. Kinds stay apart in grey, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.errors import CourseError
from course_lib.figures.image import image_html, new_figure
from course_lib.ledger import COLOURS
from course_lib.ranks.log import CollectiveLog, Entry

GATHER, REDUCE = COLOURS["gather_buffers"], COLOURS["reduce_buffers"]
FACES = {  # kind: colour, colour of outline and hatching, hatching
    "all_gather": (GATHER, "white", ""),
    "reduce_scatter": (REDUCE, "white", ""),
    "all_reduce": (GATHER, REDUCE, "////"),
    "broadcast": ("#F2F2F2", "black", "...."),
    "send": ("white", "black", "////"),
    "recv": ("#B0B0B0", "white", ""),
}
OTHER = ("#161616", "white", "")
HEADS = ("rank", "kind", "how many", "bytes per rank", "first from", "last to", "longest")


@dataclass(frozen=True)
class Row:
    """What one rank did of one kind. Times are in seconds from the log's first collective.

    `unfinished` of the `count` never came to an end; `last` and `longest` leave them out.
    """

    rank: int
    kind: str
    count: int
    unfinished: int
    bytes_per_rank: int
    first: float
    last: float
    longest: float

    def cells(self) -> tuple[str, ...]:
        """The row in words, as HEADS name them."""
        count = f"{self.count}, {self.unfinished} never done" if self.unfinished else self.count
        times = (f"{1e3 * seconds:,.2f} ms" for seconds in (self.first, self.last, self.longest))
        return (str(self.rank), self.kind, str(count), f"{self.bytes_per_rank:,}", *times)


@dataclass(frozen=True)
class Timeline:
    """Draws itself in a notebook, with the same as a table; in a terminal as the table alone."""

    log: CollectiveLog

    def __repr__(self) -> str:
        lines = [HEADS, *(row.cells() for row in table(self.log))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (map(str.rjust, line, widths) for line in lines)
        return "\n".join("  ".join(line) for line in padded)

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{head}</th>" for head in HEADS)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells())}</tr>"
            for row in table(self.log)
        )
        return (
            f'<figure style="margin:0">{image_html(_figure(self.log), words(self.log))}</figure>'
            f"<details><summary>The same as a table</summary><table><thead><tr>{heads}</tr></thead>"
            f"<tbody>{rows}</tbody></table></details>"
        )


def timeline(log: CollectiveLog) -> Timeline:
    """The timeline of a run's log, `ranks.run(...).log`; CourseError where nothing was issued."""
    if not isinstance(log, CollectiveLog) or not any(log):
        raise CourseError(
            "There is no collective to draw: give the log of a run, ranks.run(...).log, in which "
            "a rank issued one."
        )
    return Timeline(log)


def draw(axes: Axes, log: CollectiveLog) -> None:
    """Draw the lanes, rank 0's on top, in milliseconds from the first collective."""
    zero, over = _span(log)
    y, ticks, kinds = 0, [], {}
    for entries in log:
        lane = tracks(entries) or [[]]
        ticks.append(y + (len(lane) - 1) / 2)
        for track in lane:
            for entry in track:
                kinds[entry.kind] = None
                _bar(axes, y, entry, zero, over)
            y += 1
        axes.axhline(y - 0.5, color="#D0D0D0", linewidth=0.6)
    axes.set_yticks(ticks, [f"rank {rank}" for rank in range(len(log))])
    axes.set_ylim(y - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * (over - zero) * 1.01)
    axes.set_xlabel("ms from the first collective")
    axes.tick_params(axis="y", left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        handles=[Patch(label=kind, **_face(kind)) for kind in kinds],
        ncols=len(kinds),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
    )


def tracks(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Put a rank's entries into as few tracks as hold them without overlap, in order of start."""
    made: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda entry: entry.start):
        for track in made:
            if track[-1].end is not None and track[-1].end <= entry.start:
                track.append(entry)
                break
        else:
            made.append([entry])
    return made


def table(log: CollectiveLog) -> list[Row]:
    """A row for each rank and kind, in the order in which the rank issued them."""
    zero, _ = _span(log)
    rows = []
    for rank, entries in enumerate(log):
        for kind in log.counts(rank):
            mine = [entry for entry in entries if entry.kind == kind]
            ended = [entry for entry in mine if entry.end is not None]
            rows.append(
                Row(
                    rank,
                    kind,
                    count=len(mine),
                    unfinished=len(mine) - len(ended),
                    bytes_per_rank=sum(entry.bytes_per_rank for entry in mine),
                    first=min(entry.start for entry in mine) - zero,
                    last=max((entry.end for entry in ended), default=zero) - zero,
                    longest=max((entry.end - entry.start for entry in ended), default=0.0),
                )
            )
    return rows


def words(log: CollectiveLog) -> str:
    """Alternative text: how long, and what each rank issued."""
    zero, over = _span(log)
    issued = "; ".join(
        f"rank {rank} issued "
        + (", ".join(f"{count} {kind}" for kind, count in log.counts(rank).items()) or "nothing")
        for rank in range(len(log))
    )
    return f"Timeline of {len(log)} ranks over {1e3 * (over - zero):,.1f} ms: {issued}."


def _figure(log: CollectiveLog) -> Figure:
    """As high as the lanes need, with a fixed room below for the axis and above for the legend."""
    height = 1.0 + 0.24 * sum(len(tracks(entries)) or 1 for entries in log)  # inches
    figure = new_figure(height=height)
    figure.subplots_adjust(bottom=0.55 / height, top=1 - 0.35 / height)
    draw(figure.add_subplot(), log)
    return figure


def _span(log: CollectiveLog) -> tuple[float, float]:
    """When the first collective started, and when the last thing happened, in seconds."""
    entries = [entry for rank in log for entry in rank]
    times = [time for entry in entries for time in (entry.start, entry.end) if time is not None]
    return min(times), max(times)


def _bar(axes: Axes, y: float, entry: Entry, zero: float, over: float) -> None:
    """One collective; where it never ended, a bar to the right edge with a dashed outline."""
    end = over if entry.end is None else entry.end
    style = _face(entry.kind) | ({"linestyle": "--", "fill": False} if entry.end is None else {})
    axes.barh(y, 1e3 * (end - entry.start), 0.7, left=1e3 * (entry.start - zero), **style)


def _face(kind: str) -> dict:
    colour, edge, hatch = FACES.get(kind, OTHER)
    return {"facecolor": colour, "edgecolor": edge, "hatch": hatch, "linewidth": 0.8}
