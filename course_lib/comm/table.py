"""A plan as a table: HTML for a notebook, text for everything else; `course ledger` has its own."""

from collections.abc import Iterator
from html import escape

from course_lib.comm.plan import Line, Plan
from course_lib.specs import human

HEAD = ("per rank and step", "count", "bytes", "", "why")


def rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The cells of each line, under HEAD, and of the total, which comes last."""
    for line in plan.lines:
        nbytes = line.bytes_per_rank
        yield (line.kind, _count(line), f"{nbytes:,}", human(nbytes), line.why)
    total = plan.bytes_per_rank
    yield ("total", f"{plan.count:,}", f"{total:,}", human(total), "")


def text(plan: Plan) -> str:
    """Aligned columns; the reasons come last, as they are long."""
    table = [HEAD, *rows(plan)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [plan.title]
    for kind, *numbers, why in table:
        right = [number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([kind.ljust(widths[0]), *right, why]).rstrip())
    return "\n".join(lines)


def html(plan: Plan) -> str:
    *body, total = rows(plan)
    return (
        f'<table><caption style="text-align:left;white-space:nowrap">{escape(plan.title)}</caption>'
        f"<thead>{_html_row(HEAD, 'th')}</thead>"
        f"<tbody>{''.join(_html_row(row, 'td') for row in body)}{_html_row(total, 'th')}</tbody>"
        "</table>"
    )


def _count(line: Line) -> str:
    """The count; '4 × 9' for nine in each of four micro-batches."""
    each = f"{line.in_a_round:,}"
    return f"{line.rounds:,} × {each}" if line.rounds > 1 else each


def _html_row(cells: tuple[str, ...], tag: str) -> str:
    kind, *numbers, why = map(escape, cells)
    right = "".join(f'<{tag} style="text-align:right">{number}</{tag}>' for number in numbers)
    left = f'<{tag} style="text-align:left">'
    return f"<tr>{left}{kind}</{tag}>{right}{left}{why}</{tag}></tr>"
