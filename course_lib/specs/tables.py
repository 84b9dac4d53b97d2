"""Tables of published figures that ship with the course: CSV, with sources in lines after '#'."""

import csv
from pathlib import Path


def rows(path: Path) -> list[dict[str, str]]:
    """The table's rows as dicts of strings; lines that start with '#' are left out."""
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
