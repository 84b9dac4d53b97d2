"""Run one function on N ranks: the parent's half of the protocol.

The parent packs the function and its arguments once and asks a forkserver, in which torch is
already loaded, for N fresh processes. They meet through a file in a temporary folder, call the
function, and each reports one outcome (`rank` tells that half). When a rank fails or dies, the
parent gives the others a moment to report too, asks those still at work where they are, and ends
them all; when the deadline passes, likewise. Then it shows what the ranks printed, and gives
their results or raises one error that tells the story. Nothing outlives the call but the
forkserver, which waits for the next one.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.ranks import report
from course_lib.ranks.crew import Crew, warm_up
from course_lib.ranks.log import CollectiveLog, Reader
from course_lib.ranks.protocol import Job, Outcome, Raised, Returned, Unsendable


class Results(list):
    """What each rank returned, in rank order; `log` is what each rank communicated."""

    def __init__(self, values: list, log: CollectiveLog) -> None:
        super().__init__(values)
        self.log = log


MOST_RANKS = 64
MOST_TIME = 86_400  # seconds
MOST_OUTPUT = 64 * 1024  # bytes of one rank's prints that are shown


def run(
    fn: Callable, world_size: int = 4, args: tuple = (), timeout: float = 60, seed: int = 0
) -> list:
    """Call `fn(*args)` on `world_size` ranks; give the results in rank order.

    Each rank is a fresh process inside an initialised gloo process group (`dist.get_rank()` says
    which one it is), with torch, numpy and random seeded by `seed` + rank. `timeout` is in
    seconds, from when the ranks have been started. What they print is shown when all have ended,
    labelled `rank 2 | …`. Tensors in the results are on the CPU.

    Errors: RankError when a rank raises, dies or returns what cannot be sent; RankTimeout when
    the deadline passes; CourseError when what was given cannot be run.
    """
    _check(fn, world_size, args, timeout, seed)
    warm_up()
    work = _packed(fn, args)  # loads torch, while the forkserver is loading it too
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(work, world_size, Path(folder), timeout, seed, dict(os.environ))
        crew = Crew(job)
        try:
            crew.start()
            outcomes = crew.outcomes()
        finally:
            crew.end()
            _replay(job)
        log = CollectiveLog(Reader(rank, job.log(rank)).read() for rank in range(world_size))
    return Results(_results(outcomes, timeout), log)


def _check(fn: Callable, world_size: int, args: tuple, timeout: float, seed: int) -> None:
    if multiprocessing.current_process().name.startswith("rank "):
        problem = "ranks.run was called inside a rank; call it from outside the ranks"
    elif "forkserver" not in multiprocessing.get_all_start_methods():
        problem = f"ranks.run needs Linux or macOS, this is {sys.platform}; use WSL or a container"
    elif not callable(fn):
        problem = f"fn is {fn!r}, not a function; give the function, and its arguments in args"
    elif not _whole(world_size) or not 1 <= world_size <= MOST_RANKS:
        problem = (
            f"world_size is {world_size!r}; give a whole number from 1 to {MOST_RANKS}, as each "
            "rank is a process on this machine"
        )
    elif not isinstance(args, tuple):
        problem = f"args is a {type(args).__name__}, not a tuple; for one argument write args=(x,)"
    elif not isinstance(timeout, (int, float)) or not 0 < timeout <= MOST_TIME:
        problem = f"timeout is {timeout!r}; give seconds, more than 0 and at most {MOST_TIME}"
    elif not _whole(seed):
        problem = f"seed is {seed!r}; give a whole number"
    else:
        return
    raise CourseError(problem)


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _packed(fn: Callable, args: tuple) -> bytes:
    from course_lib.ranks import wire

    try:
        return wire.pack((fn, args))
    except Exception as error:
        raise CourseError(
            f"fn and args cannot be sent to the ranks ({error}); pass plain data and tensors, and "
            "make or open everything else inside fn"
        ) from error


def _replay(job: Job) -> None:
    """Print what each rank printed, in rank order, labelled."""
    for rank in range(job.world_size):
        path = job.output(rank)
        if not path.exists():
            continue
        with path.open("rb") as file:
            text = file.read(MOST_OUTPUT).decode(errors="replace")
            left = path.stat().st_size - file.tell()
        lines = text.removesuffix("\n").split("\n") if text else []
        lines = [line.rsplit("\r", 1)[-1] for line in lines]  # a progress bar: as it ended
        lines += [f"… {left:,} more bytes"] if left else []
        sys.stdout.write("".join(f"rank {rank} | {line}\n" for line in lines))
    sys.stdout.flush()


def _results(outcomes: list[Outcome], timeout: float) -> list:
    """The values, if every rank returned one; else the error."""
    from course_lib.ranks import wire

    values = []
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Returned):
            try:
                values.append(wire.unpack(outcome.packed))
            except Exception as error:
                outcomes[rank] = Unsendable("value", f"it cannot be read again: {error}")
    if len(values) == len(outcomes):
        return values
    raise report.error(outcomes, timeout) from _cause(outcomes)


def _cause(outcomes: list[Outcome]) -> BaseException | None:
    """The exception of the first rank to blame, if it can be had here."""
    from course_lib.ranks import wire

    for outcome in report.to_blame(dict(enumerate(outcomes))).values():
        if isinstance(outcome, Raised) and outcome.packed:
            with contextlib.suppress(Exception):
                return wire.unpack(outcome.packed)
    return None
