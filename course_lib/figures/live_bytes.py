"""Live bytes over a step, as stacked areas: what stays, what comes and goes, and how high it gets.

HTML(live_bytes({"ZeRO-2": (moments, end), "ZeRO-3": (moments, end)}, "what it shows"))
"""

from collections.abc import Mapping, Sequence

from course_lib.figures.image import image_html, new_figure
from course_lib.ledger import COLOURS, LABELS
from course_lib.specs import human

MIB = 2**20
POINTS = 150  # of a curve: more cannot be told apart, and weigh on the notebook
Step = tuple[Sequence[Mapping[str, int]], int]


def live_bytes(steps: Mapping[str, Step], alt: str) -> str:
    """HTML: a panel for each of `steps`, and the peaks as a table. `alt`: what the picture shows.

    A step is its moments, {category: bytes} as `measure.Moment.live` has them, and the index of the
    moment where backward ends, which a dashed line marks.
    """
    figure = new_figure(height=3.6)
    figure.subplots_adjust(wspace=0.3, top=0.8)
    panels = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    shown = {c for moments, _ in steps.values() for live in moments for c in live if live[c]}
    categories = [c for c in COLOURS if c in shown]
    for axes, (name, (moments, end)) in zip(panels, steps.items(), strict=True):
        starts, fullest = thinned(moments)
        rows = [[live.get(c, 0) / MIB for live in fullest] for c in categories]
        colours = [COLOURS[c] for c in categories]
        labels = [LABELS[c] for c in categories]
        axes.stackplot(starts, rows, colors=colours, labels=labels, linewidth=0)
        axes.axvline(end, color="black", linestyle="--", linewidth=1)
        axes.set(xlabel=f"{name}: moments of a step", ylabel="MiB on a rank")
        axes.set_xlim(0, len(moments))
        axes.spines[["top", "right"]].set_visible(False)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="upper center", ncols=4, frameon=False, fontsize=9)
    return f"{image_html(figure, alt)}{_table(steps, categories)}"


def thinned(moments: Sequence[Mapping[str, int]]) -> tuple[range, list[Mapping[str, int]]]:
    """The fullest moment of each of POINTS stretches at most, and where these begin."""
    every = -(-len(moments) // POINTS)
    starts = range(0, len(moments), every)
    return starts, [max(moments[i : i + every], key=_total) for i in starts]


def _total(live: Mapping[str, int]) -> int:
    return sum(live.values())


def _table(steps: Mapping[str, Step], categories: Sequence[str]) -> str:
    """At the peak of each step: bytes of each category."""
    peaks = [max(moments, key=_total) for moments, _ in steps.values()]
    rows = [(LABELS[c], *(human(peak.get(c, 0)) for peak in peaks)) for c in categories]
    rows.append(("together", *(human(_total(peak)) for peak in peaks)))
    head = "".join(f"<th>{cell}</th>" for cell in ("at the peak", *steps))
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
