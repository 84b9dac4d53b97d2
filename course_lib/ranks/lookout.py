"""Watches the collective logs while the ranks run, and says when the run cannot end well.

A look is cheap: as long as the logs of all ranks grow, they are not even read. When a rank falls
silent, the open calls are judged, and what a look finds must be found again a moment later before
the run is ended for it.
"""

import time
from collections.abc import Mapping

from course_lib.ranks.desync import Calls, Verdict
from course_lib.ranks.log import CollectiveLog, Entry
from course_lib.ranks.protocol import Job, Outcome, Returned, Unfinished
from course_lib.ranks.reader import MOST, Reader

CONFIRM = 0.3  # seconds between the two looks


class Lookout:
    """The logs of a job's ranks."""

    def __init__(self, job: Job) -> None:
        self._readers = [Reader(rank, job.log(rank)) for rank in range(job.world_size)]
        self._calls = Calls()
        self._sizes: dict[int, int] = {}
        self._suspicion: Verdict | None = None
        self._since = 0.0
        self._confirmed: Verdict | None = None

    def over(self, found: Mapping[int, Outcome]) -> bool:
        """True once it is certain that those without an outcome cannot all end well."""
        now, verdict = time.monotonic(), None
        if self._silent(found):
            self._read()
            blocked = self._blocked(found)
            if _failed(found) and len(blocked) + len(found) == len(self._readers):
                return True  # nobody is left who has more to tell
            verdict = self._calls.verdict(blocked, self._returned(found))
        if verdict != self._suspicion:
            self._suspicion, self._since = verdict, now
        elif verdict and now - self._since >= CONFIRM:
            self._confirmed = verdict
        return self._confirmed is not None

    def verdict(self, outcomes: Mapping[int, Outcome]) -> Verdict | None:
        """What the ranks did not agree on, once each has its outcome.

        Where a rank failed, the others may miss it: then only what they called is compared.
        """
        if self._confirmed:
            return self._confirmed
        self._read()
        if _failed(outcomes):
            return self._calls.mismatch()
        return self._calls.mismatch() or self._calls.absent(self._returned(outcomes))

    def log(self) -> CollectiveLog:
        return CollectiveLog(reader.read() for reader in self._readers)

    def latest(self) -> list[str]:
        """The last collective that each rank entered, as far as that is cheap to know."""
        return [reader.latest() for reader in self._readers]

    def _silent(self, found: Mapping[int, Outcome]) -> bool:
        """Has the log of some rank at work not grown since the last look?"""
        sizes = {reader.rank: reader.size for reader in self._readers if reader.rank not in found}
        before, self._sizes = self._sizes, sizes
        return any(size and size == before.get(rank) for rank, size in sizes.items())

    def _blocked(self, found: Mapping[int, Outcome]) -> dict[int, Entry]:
        """What each rank at work waits for, of those that wait."""
        at_work = [reader for reader in self._readers if reader.rank not in found]
        return {reader.rank: reader.blocked for reader in at_work if reader.blocked}

    def _read(self) -> None:
        for reader in self._readers:
            self._calls.add(reader.rank, reader.read())

    def _returned(self, found: Mapping[int, Outcome]) -> set[int]:
        """The ranks that have returned, and all of whose collectives are in the log."""
        done = {rank for rank, outcome in found.items() if isinstance(outcome, Returned)}
        return {rank for rank in done if len(self._readers[rank].read()) < MOST}


def _failed(outcomes: Mapping[int, Outcome]) -> bool:
    return any(not isinstance(outcome, (Returned, Unfinished)) for outcome in outcomes.values())
