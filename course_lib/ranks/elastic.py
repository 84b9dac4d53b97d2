"""`ranks.run` inside torchrun, where the ranks are there already and each makes the same call.

    torchrun --nproc-per-node=2 train.py

No process is started. Each rank joins the process group, if the script has not made one, calls the
function, and sends what it returned and its log to all the others, over a group of gloo's own; so
each rank gets the results that one process would have got. Then the logs are compared. A rank that
fails raises, and torchrun ends the others. A hang meets the timeout of the process group: it is
this call's where the group was made here.

Where there is a GPU for each rank, tensors on them travel by NCCL.
"""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.ranks import report
from course_lib.ranks.desync import Calls
from course_lib.ranks.log import CollectiveLog, Results
from course_lib.ranks.protocol import Outcome, Returned, Unsendable

SLACK = 60.0  # seconds after the deadline, for the exchange of results

_ours = None  # the group over which results are exchanged
_made_here = False  # did this module make the default group?
_running = False


def launched() -> bool:
    """Did torchrun start this process?"""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run(fn: Callable, world_size: int, args: tuple, timeout: float, seed: int | None) -> Results:
    """What `ranks.run` promises, on the ranks that torchrun started."""
    global _running
    _check(world_size)
    _join(timeout)
    _running = True
    try:
        packed, entries = _call(fn, args, timeout, seed)
    finally:
        _running = False
    return _exchanged(packed, entries, timeout)


def _check(world_size: int) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if _running:
        raise CourseError("ranks.run was called inside a rank; call it from outside the ranks")
    if world_size != started:
        raise CourseError(
            f"world_size is {world_size}, but torchrun started {started} ranks; start it with "
            f"--nproc-per-node={world_size}, or write ranks.run(..., world_size={started})"
        )


def _join(timeout: float) -> None:
    import torch
    import torch.distributed as dist

    from course_lib.ranks import rank as ranks_half

    global _ours, _made_here
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if here == int(os.environ["WORLD_SIZE"]):
        ranks_half.use_loopback()
    if not dist.is_initialized():
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= here
        if gpus:
            torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
        _made_here = True
    if _ours is None:
        _ours = dist.new_group(backend="gloo")
    if _made_here:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout + SLACK), _ours)
    dist.barrier(_ours)


def _call(fn: Callable, args: tuple, timeout: float, seed: int | None) -> tuple[bytes, tuple]:
    """What the function returned on this rank, packed, and this rank's entries."""
    from course_lib.ranks import rank as ranks_half
    from course_lib.ranks import wire
    from course_lib.ranks.recorder import Recorder

    rank = int(os.environ["RANK"])
    ranks_half.seed_all(None if seed is None else seed + rank)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        recorder = Recorder.start(rank, Path(folder, "log"))
        try:
            value = fn(*args)
        except Exception as error:
            raise _failure(rank, ranks_half.raised(error), recorder.entries()) from error
        finally:
            Recorder.current = None
        try:
            return wire.pack(value), recorder.entries()
        except Exception as error:
            unsendable = Unsendable(type(value).__name__, str(error))
            raise _failure(rank, unsendable, recorder.entries()) from error


def _failure(rank: int, outcome: Outcome, entries: tuple) -> report.RankError:
    return report.RankError(report.failure(rank, outcome, entries[-1] if entries else None))


def _exchanged(packed: bytes, entries: tuple, timeout: float) -> Results:
    """The results of all ranks, if they agreed on what to call."""
    import torch.distributed as dist

    from course_lib.ranks import wire

    told: list = [None] * dist.get_world_size()
    dist.all_gather_object(told, (packed, entries), group=_ours)
    log = CollectiveLog(entries for _, entries in told)
    calls = Calls()
    for rank, own in enumerate(log):
        calls.add(rank, own)
    if verdict := calls.mismatch() or calls.absent(set(range(len(log)))):
        outcomes = [Returned(packed) for packed, _ in told]
        raise report.error(outcomes, timeout, verdict, log)
    return Results([wire.unpack(packed) for packed, _ in told], log)
