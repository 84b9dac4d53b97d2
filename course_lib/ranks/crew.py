"""The processes of one run: started, watched, asked where they are, ended.

Each rank has a pipe to the parent. The parent waits on pipes and processes together, so it learns
at once that a rank has reported or died; it never writes, and to close a pipe is to send its rank
away.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from course_lib.ranks import stack
from course_lib.ranks.protocol import Died, Job, Outcome, Returned, Unfinished

LOOK = 0.2  # seconds between two looks at ranks at work
GRACE = 1.0  # seconds for the others to report, once a rank has failed
LOADING = 30.0  # seconds more for ranks that have to load torch first
ANSWER = 0.5  # seconds for a rank at work to say where
LEAVING = 0.5  # seconds to leave before a rank is killed

_starting = threading.Lock()


@dataclass(frozen=True)
class Member:
    """A rank as the parent sees it."""

    rank: int
    process: BaseProcess
    pipe: connection.Connection


class Crew:
    """The ranks of a job. Whoever calls `start` calls `end`, whatever happens in between."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.members: list[Member] = []
        self.found: dict[int, Outcome] = {}

    def start(self) -> None:
        """Start one fresh process for each rank."""
        from course_lib.ranks import rank as ranks_half  # loads torch

        context = multiprocessing.get_context(start_method())
        for rank in range(self.job.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=ranks_half.main,
                args=(rank, self.job, theirs),
                name=f"rank {rank} of {self.job.world_size}",
            )
            with _main_hidden():
                process.start()
            self.members.append(Member(rank, process, ours))
            theirs.close()

    def watch(self, look: Callable[[float, dict[int, Outcome]], bool]) -> None:
        """Until each rank has an outcome, at the latest soon after the job's deadline.

        The first failure brings the deadline forward. A few times a second `look` is called with
        the seconds since the start and the outcomes so far; the run is over when it says so.
        """
        start = time.monotonic()
        loading = LOADING if start_method() == "spawn" else 0.0
        deadline, next_look = start + self.job.timeout + loading, start + LOOK
        while missing := self._missing():
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK
                if look(now - start, self.found):
                    return
            if now >= deadline:
                return
            sources = [source for m in missing for source in (m.pipe, m.process.sentinel)]
            ready = connection.wait(sources, max(0.0, min(deadline, next_look) - now))
            for member in missing:
                if member.pipe in ready or member.process.sentinel in ready:
                    self.found[member.rank] = outcome = _receive(member)
                    if not isinstance(outcome, Returned):
                        deadline = min(deadline, time.monotonic() + GRACE)

    def outcomes(self) -> list[Outcome]:
        """What has become of each rank, in rank order; of those at work, where they are."""
        outcomes = self.found | self._locate(self._missing())
        return [outcomes[member.rank] for member in self.members]

    def end(self) -> None:
        """End all ranks and whatever they started."""
        for member in self.members:
            member.pipe.close()
        until = time.monotonic() + LEAVING
        try:
            for member in self.members:
                member.process.join(max(0.0, until - time.monotonic()))
        finally:
            self._kill()

    def _kill(self) -> None:
        for member in self.members:
            member.process.kill()
            with contextlib.suppress(AttributeError, ProcessLookupError, PermissionError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.process.join()
            member.process.close()

    def _missing(self) -> list[Member]:
        return [member for member in self.members if member.rank not in self.found]

    def _locate(self, at_work: list[Member]) -> dict[int, Unfinished]:
        """Ask ranks where they are. A rank can be asked once its file has a first line."""
        stacks = {member.rank: () for member in at_work}
        asked = [m for m in at_work if "\n" in _text(self.job.where(m.rank))]
        asked = asked if hasattr(signal, "SIGUSR1") else []
        for member in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGUSR1)
        until = time.monotonic() + ANSWER
        while asked and time.monotonic() < until:
            time.sleep(0.01)
            for member in list(asked):
                stacks[member.rank], whole = stack.dumped(_text(self.job.where(member.rank)))
                if whole:
                    asked.remove(member)
        return {rank: Unfinished(frames) for rank, frames in stacks.items()}


def start_method() -> str:
    """How ranks come to be: forked from a process that has loaded torch, which takes no time.

    Windows cannot fork. On macOS a fork is not safe once Accelerate, which numpy and torch load,
    has started threads. There each rank is a new process that loads torch: seconds for each run.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    return os.environ.get("COURSE_RANKS_START") or ("forkserver" if forks else "spawn")


def warm_up() -> None:
    """Start the process that forks ranks, if it is not running, without waiting for it.

    It takes some seconds to load torch; a first `run` that comes later finds that done.
    """
    if start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    with _main_hidden():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["course_lib.ranks.preload"])
        forkserver.ensure_running()


def _receive(member: Member) -> Outcome:
    """The report of a rank that has sent one, or else of one that is dead."""
    with contextlib.suppress(EOFError, OSError):
        if member.pipe.poll():
            return member.pipe.recv()
    member.process.join(LEAVING)
    return Died(member.process.exitcode)


def _text(path: os.PathLike) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """A new process would import this one's `__main__` again, and so run the script again.

    Nobody needs that: what `__main__` defines travels by value.
    """
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
