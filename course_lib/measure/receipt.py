"""A receipt: what the ledger predicted beside what was measured, line by line, to the byte."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Line:
    what: str
    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        """Measured minus predicted, in bytes."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class Receipt:
    """Draws itself as a table, in a notebook and in a terminal."""

    title: str
    lines: tuple[Line, ...]

    @property
    def balances(self) -> bool:
        return all(line.difference == 0 for line in self.lines)

    def __repr__(self) -> str:
        rows = [(self.title, "predicted", "measured", "difference")]
        for x in self.lines:
            rows.append((x.what, f"{x.predicted:,}", f"{x.measured:,}", f"{x.difference:+,}"))
        first = max(len(row[0]) for row in rows)
        text = [f"{a:<{first}}  {b:>16}  {c:>16}  {d:>12}".rstrip() for a, b, c, d in rows]
        return "\n".join([*text, self._verdict()])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left">{escape(x.what)}</td><td>{x.predicted:,}</td>'
            f"<td>{x.measured:,}</td><td>{x.difference:+,}</td></tr>"
            for x in self.lines
        )
        return (
            f"<table><caption>{escape(self.title)}, in bytes</caption><thead><tr>"
            '<th style="text-align:left">what</th><th>predicted</th><th>measured</th>'
            f"<th>difference</th></tr></thead><tbody>{rows}</tbody></table>"
            f"<p>{escape(self._verdict())}</p>"
        )

    def _verdict(self) -> str:
        if self.balances:
            return "The receipt balances: difference 0."
        worst = max(self.lines, key=lambda line: abs(line.difference))
        return f"The receipt does not balance: {worst.what} is off by {worst.difference:+,} bytes."


def receipt(title: str, predicted: Mapping[str, int], measured: Mapping[str, int]) -> Receipt:
    """Lay two mappings from line to bytes beside each other; a line that one lacks counts as 0."""
    names = [*predicted, *(name for name in measured if name not in predicted)]
    lines = tuple(Line(n, predicted.get(n, 0), measured.get(n, 0)) for n in names)
    return Receipt(title, lines)
