"""A learner's progress: one line of JSON for each check that was run.

The file lies in `.course/` at the top of the learner's work folder, which `course lab` makes.
Where there is no such folder above the current one (the course's own tests and builds, say),
nothing is recorded. Lines are only ever appended, so two notebooks cannot spoil each other's.
"""

import json
import os
from datetime import datetime
from pathlib import Path

from course_lib.errors import CourseError

FOLDER = ".course"
FILE = "progress.jsonl"


def file(start: Path | None = None) -> Path | None:
    """The progress file for a notebook that runs in `start`, or None outside a work folder."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / FOLDER).is_dir():
            return folder / FOLDER / FILE
    return None


def record(report: dict, path: Path | None = None) -> None:
    """Append a report's score and sentence. A full or read-only disk must not fail a check."""
    path = path or file()
    if path is None:
        return
    kept = {key: report[key] for key in ("exercise", "points", "score", "sentence")}
    line = json.dumps(kept | {"when": datetime.now().astimezone().isoformat(timespec="seconds")})
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode() + b"\n")
        finally:
            os.close(handle)
    except OSError:
        return


def read(path: Path | None = None) -> list[dict]:
    """All records, oldest first; none where there is no file.

    A file that cannot be read is moved aside, never deleted; the lines that can be read stay.
    CourseError then says where the old one is.
    """
    path = path or file()
    if path is None or not path.exists():
        return []
    try:
        return _read(path)
    except OSError as error:
        raise CourseError(
            f"The progress file {path} could not be read ({error.strerror}): see what lies there."
        ) from error


def _read(path: Path) -> list[dict]:
    lines = path.read_bytes().splitlines()
    records = [_parse(line) for line in lines]
    if None not in records:
        return records
    aside = path.with_name(f"{path.name}.damaged-{datetime.now():%Y%m%dT%H%M%S%f}")
    path.rename(aside)
    path.write_bytes(b"".join(line + b"\n" for line, ok in zip(lines, records, strict=True) if ok))
    raise CourseError(
        f"The progress file {path} was damaged: it was moved to {aside.name}, and the "
        f"{sum(map(bool, records))} records that could be read were kept; run the command again."
    )


def _parse(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    wanted = {"exercise": str, "points": int, "score": int, "when": str}
    if not isinstance(record, dict):
        return None
    typed = all(type(record.get(key)) is kind for key, kind in wanted.items())
    return record if typed and 0 <= record["score"] <= record["points"] else None
