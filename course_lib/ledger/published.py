"""Published figures that the ledger must reproduce, kept as the sources print them."""

from dataclasses import dataclass
from pathlib import Path

from course_lib.specs.tables import rows

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class ZeroRow:
    """A row of table 1 of the ZeRO paper: `cells` are its GB (decimal) for P_os, P_os+g, P_os+g+p,
    as printed, which truncates the large ones."""

    ranks: int
    parameters: int
    cells: tuple[str, str, str]


def zero_table1() -> tuple[ZeroRow, ...]:
    """The 18 rows of table 1 of the ZeRO paper (arXiv 1910.02054): Adam, K = 12."""
    return tuple(
        ZeroRow(
            ranks=int(row["dp_degree"]),
            parameters=int(float(row["model_params"])),
            cells=(row["pos_gb"], row["pos_g_gb"], row["pos_g_p_gb"]),
        )
        for row in rows(DATA / "zero_table1.csv")
    )
