"""Run one function on N ranks: the parent's half of the protocol.

The parent packs the function and its arguments once and asks a forkserver, in which torch is
already loaded, for N fresh processes. They meet through a file in a temporary folder, call the
function, and each reports one outcome (`rank` tells that half). Meanwhile the parent shows what
they print (`screen`), and from their logs it may see that they do not agree or wait for each other
(`lookout`). Then, or when a rank fails or dies, or the deadline passes, it asks those still at
work where they are and ends them all. It gives their results or raises one error that tells the
story. Nothing outlives the call but the forkserver, which waits for the next one.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.ranks import arguments, report
from course_lib.ranks.crew import Crew, warm_up
from course_lib.ranks.desync import Verdict
from course_lib.ranks.log import CollectiveLog, Results
from course_lib.ranks.lookout import Lookout
from course_lib.ranks.protocol import Job, Outcome, Raised, Returned, Unsendable
from course_lib.ranks.screen import Screen


def run(
    fn: Callable,
    world_size: int = 4,
    args: tuple = (),
    timeout: float = 60,
    seed: int | None = 0,
) -> Results:
    """Call `fn(*args)` on `world_size` ranks; give the results in rank order, with their `log`.

    Each rank is a fresh process inside an initialised gloo process group (`dist.get_rank()` says
    which one it is). `timeout` is in seconds, from when the ranks have been started. What they
    print is shown labelled `rank 2 | …`: as it comes, or all at the end where a run is over within
    a second. Tensors in the results are on the CPU.

    torch, numpy and random are seeded by `seed` + rank: each rank draws its own numbers, the same
    at every run. With `seed=None` they are not seeded, and draw others each time.

    Inside torchrun the ranks are those that it started (`elastic`).

    Errors: RankError when a rank raises, dies or returns what cannot be sent; RankDesync when the
    ranks do not call the same collectives, or wait for each other; RankTimeout when the deadline
    passes; CourseError when what was given cannot be run.
    """
    arguments.check(fn, world_size, args, timeout, seed)
    if arguments.torchrun_ranks():
        from course_lib.ranks import elastic  # loads torch

        return elastic.run(fn, args, timeout, seed)
    warm_up()
    work = _packed(fn, args)  # loads torch, while the forkserver is loading it too
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(work, world_size, Path(folder), timeout, seed, dict(os.environ))
        outcomes, lookout = _run(job)
        verdict, log = lookout.verdict(dict(enumerate(outcomes))), lookout.log()
    return Results(_values(outcomes, timeout, verdict, log), log)


def _run(job: Job) -> tuple[list[Outcome], Lookout]:
    crew, lookout = Crew(job), Lookout(job)
    screen = Screen(job, lookout)

    def look(seconds: float, found: dict[int, Outcome]) -> bool:
        screen.refresh(seconds)
        return lookout.over(found)

    try:
        crew.start()
        crew.watch(look)
        return crew.outcomes(), lookout
    except KeyboardInterrupt:
        # A lookout that was interrupted may have lost its place in a log.
        raise report.interrupt(crew.outcomes(), Lookout(job).log()) from None
    finally:
        crew.end()
        screen.close()


def _packed(fn: Callable, args: tuple) -> bytes:
    from course_lib.ranks import wire

    try:
        return wire.pack((fn, args))
    except Exception as error:
        raise CourseError(
            f"fn and args cannot be sent to the ranks ({error}); pass plain data and tensors, and "
            "make or open everything else inside fn"
        ) from error


def _values(
    outcomes: list[Outcome], timeout: float, verdict: Verdict | None, log: CollectiveLog
) -> list:
    """The values, if every rank returned one and they all agreed; else the error."""
    from course_lib.ranks import wire

    values = []
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Returned):
            try:
                values.append(wire.unpack(outcome.packed))
            except Exception as error:
                outcomes[rank] = Unsendable("value", f"it cannot be read again: {error}")
    if len(values) == len(outcomes) and not verdict:
        return values
    raise report.error(outcomes, timeout, verdict, log) from _cause(outcomes)


def _cause(outcomes: list[Outcome]) -> BaseException | None:
    """The exception of the first rank to blame, if it can be had here."""
    from course_lib.ranks import wire

    for outcome in report.to_blame(dict(enumerate(outcomes))).values():
        if isinstance(outcome, Raised) and outcome.packed:
            with contextlib.suppress(Exception):
                return wire.unpack(outcome.packed)
    return None
