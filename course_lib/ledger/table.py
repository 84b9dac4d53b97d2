"""A ledger as a table: HTML for a notebook, text for everything else; `course ledger` has its own.

All three draw the same rows: for each category its bytes on the GPU, and beneath it its lines.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from course_lib.ledger.ledger import Ledger
from course_lib.ledger.palette import COLOURS, LABELS
from course_lib.specs import gib, human

HEAD = ("per rank", "elements × bytes", "bytes", "GiB", "share")


@dataclass(frozen=True)
class Row:
    """The cells of one row, under HEAD. `category` is set in the row that opens a category."""

    cells: tuple[str, str, str, str, str]
    category: str = ""
    total: bool = False


def rows(ledger: Ledger) -> Iterator[Row]:
    for category, nbytes in ledger.by_category().items():
        yield Row((LABELS[category], "", *_sizes(nbytes, ledger.total)), category)
        for line in ledger.lines:
            if line.category == category:
                nbytes, gibs, share = _sizes(line.bytes, ledger.total)
                share = "host" if line.host else share
                yield Row((line.what, line.formula, nbytes, gibs, share))
    nbytes, gibs, _ = _sizes(ledger.total, ledger.total)
    yield Row(("total on the GPU", "", nbytes, gibs, ""), total=True)


def title(ledger: Ledger) -> str:
    """The job in one line."""
    recipe, strategy, model = ledger.recipe, ledger.strategy, ledger.model
    ranks = "1 rank" if strategy.gpus == 1 else f"{strategy.gpus:,} ranks"
    return (
        f"{model.name}, {model.parameters:,} parameters; {recipe.precision}, "
        f"{recipe.optimizer}; {strategy.name} on {ranks}"
    )


def notes(ledger: Ledger) -> list[str]:
    """What the rows leave unsaid: how shares are cut, and what is in the host's memory."""
    cuts: dict[str, list[str]] = {}
    for line in ledger.lines:
        known = cuts.setdefault(line.share, [])
        if LABELS[line.category] not in known:
            known.append(LABELS[line.category])
    cuts.pop("", None)
    said = [f"{', '.join(categories)}: {share}" for share, categories in cuts.items()]
    if ledger.host:
        ranks = min(ledger.strategy.gpus, ledger.strategy.gpus_per_node)
        node = f", {human(ledger.host * ranks)} for the {ranks} on a node" if ranks > 1 else ""
        said.append(f"host's memory: {human(ledger.host)} per rank{node}")
    return said


def text(ledger: Ledger) -> str:
    """Aligned columns, within 80 for models of up to 100 billion parameters."""
    table = [HEAD]
    for row in rows(ledger):
        what, *numbers = row.cells
        table.append((what if row.category or row.total else f"  {what}", *numbers))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [title(ledger)]
    for what, *numbers in table:
        right = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([what.ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines + notes(ledger))


def html(ledger: Ledger) -> str:
    """A table with each category's colour."""
    body = "".join(map(_html_row, rows(ledger)))
    said = "".join(f"<div><small>{escape(note)}</small></div>" for note in notes(ledger))
    return (
        f'<table><caption style="text-align:left;white-space:nowrap">{escape(title(ledger))}'
        "</caption>"
        f"<thead>{_html_cells(HEAD, 'th')}</thead><tbody>{body}</tbody></table>{said}"
    )


def _html_row(row: Row) -> str:
    what, *numbers = map(escape, row.cells)
    if row.category:
        colour = COLOURS[row.category]
        what = f'<span aria-hidden="true" style="color:{colour}">&#9632;</span> {what}'
    elif not row.total:
        what = f'<span style="padding-left:1.2em">{what}</span>'
    return _html_cells((what, *numbers), "th" if row.category or row.total else "td")


def _html_cells(cells: tuple[str, ...], tag: str) -> str:
    first, *rest = cells
    numbers = "".join(f'<{tag} style="text-align:right">{cell}</{tag}>' for cell in rest)
    return f'<tr><{tag} style="text-align:left">{first}</{tag}>{numbers}</tr>'


def _sizes(nbytes: int, total: int) -> tuple[str, str, str]:
    """Bytes, GiB (the column's head names the unit) and the share of the total."""
    percent = 100 * nbytes / total if nbytes and total else 0
    # A trace of something is not nothing.
    share = "< 0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"
    return f"{nbytes:,}", gib(nbytes, digits=3).removesuffix(" GiB"), share
