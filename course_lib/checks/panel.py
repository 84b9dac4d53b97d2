"""Draw a report: as a short panel in a notebook, as lines in a terminal."""

from html import escape

from course_lib.checks.judging import Part, Report

MIME = "application/vnd.course.report+json"


def bundle(report: Report, solution: str = "") -> dict:
    """The notebook's output: the panel, the same in words, and the report as plain data."""
    return {
        "text/html": html(report, solution),
        "text/plain": text(report),
        MIME: report.to_dict(),
    }


def text(report: Report) -> str:
    """The panel in words. A passed report says so in one line."""
    lines = [_headline(report)]
    if report.passed:
        return lines[0]
    if len(report.parts) > 1:
        lines += [f"  {part.name}: {_verdict(part)}" for part in report.parts]
    lines += [f"  {report.sentence}"]
    if report.failing:
        lines += [f"  Smallest failing case: {report.failing}.", f"  There, {report.difference}."]
    if report.further:
        lines += [f"  A further hint: {report.further}"]
    return "\n".join(lines)


def html(report: Report, solution: str = "") -> str:
    """The panel; a further hint and the solution are folded away until asked for."""
    colour = "#0072b2" if report.passed else "#d55e00"
    body = [f'<p style="margin:0"><strong>{escape(_headline(report))}</strong></p>']
    if not report.passed:
        body += _failure(report)
        if report.further:
            body.append(_folded("A further hint", f"<p>{escape(report.further)}</p>"))
        if solution:
            body.append(_folded("Show a solution", f"<pre>{escape(solution)}</pre>"))
    return (
        f'<div role="status" style="border-left:4px solid {colour};padding:.4em .8em;'
        f'max-width:46em">{"".join(body)}</div>'
    )


def _headline(report: Report) -> str:
    points = _points(report.points)
    verdict = f"passed, {points}" if report.passed else f"{report.score} of {points}"
    return f"{report.exercise} · {report.title}: {verdict}"


def _failure(report: Report) -> list[str]:
    body = []
    if len(report.parts) > 1:
        rows = "".join(
            f"<li>{escape(part.name)}: {escape(_verdict(part))}</li>" for part in report.parts
        )
        body.append(f'<ul style="margin:.3em 0">{rows}</ul>')
    body.append(f'<p style="margin:.4em 0">{escape(report.sentence)}</p>')
    if report.failing:
        body.append(
            f'<p style="margin:.4em 0">Smallest failing case: {escape(report.failing)}.<br>'
            f"There, {escape(report.difference)}.<br>"
            f'<small>The same cases again: <code>check("{escape(report.exercise)}", …, '
            f"seed={report.seed})</code></small></p>"
        )
    if report.printed:
        body.append(_folded("What it printed there", f"<pre>{escape(report.printed)}</pre>"))
    return body


def _verdict(part: Part) -> str:
    if part.passed:
        return f"passed, {_points(part.points)}"
    return f"{part.held} of {part.cases} cases hold, 0 of {_points(part.points)}"


def _points(number: int) -> str:
    return f"{number} point{'' if number == 1 else 's'}"


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"
