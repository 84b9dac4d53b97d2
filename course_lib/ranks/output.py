"""What the ranks print, labelled `rank 2 | …`, in rank order.

A run that is over soon shows all of it at its end, rank by rank, so that it looks the same each
time. A longer run shows whole lines as they come, a few times a second.
"""

import sys
from pathlib import Path

from course_lib.ranks.protocol import Job

MOST = 64 * 1024  # bytes of one rank's prints that are shown


class Output:
    """What the ranks of a job have printed, as far as it has not been shown yet."""

    def __init__(self, job: Job) -> None:
        self._paths = [job.output(rank) for rank in range(job.world_size)]
        self._shown = [0] * job.world_size  # bytes of each rank's file

    def show(self, end: bool = False) -> None:
        """Print what has come; at the end also lines that are not whole, and what was left out."""
        text = "".join(
            f"rank {rank} | {line}\n"
            for rank, path in enumerate(self._paths)
            if path.exists()
            for line in self._lines(rank, path, end)
        )
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def waits(self) -> bool:
        """Is there anything new?"""
        return any(
            path.exists() and shown < min(path.stat().st_size, MOST)
            for path, shown in zip(self._paths, self._shown, strict=True)
        )

    def _lines(self, rank: int, path: Path, end: bool) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._shown[rank])
            text = file.read(MOST - self._shown[rank])
        if not end:
            text = text[: text.rfind(b"\n") + 1]
        self._shown[rank] += len(text)
        left = path.stat().st_size - self._shown[rank]
        lines = text.decode(errors="replace").removesuffix("\n").split("\n") if text else []
        lines = [line.rsplit("\r", 1)[-1] for line in lines]  # a progress bar: as it ended
        return lines + ([f"… {left:,} more bytes"] if end and left else [])
