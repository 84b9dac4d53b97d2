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

import torch
import torch.distributed as dist

from course_lib.errors import CourseError
from course_lib.ranks import rank as ranks_half
from course_lib.ranks import report, wire
from course_lib.ranks.desync import Calls
from course_lib.ranks.log import CollectiveLog, Entry, Results
from course_lib.ranks.protocol import Returned, Unsendable
from course_lib.ranks.recorder import Recorder

SLACK = 60.0  # seconds after the deadline, for the exchange of results

_results_group: dist.ProcessGroup | None = None
_made_here = False  # did this module make the default group?


def run(fn: Callable, args: tuple, timeout: float, seed: int | None) -> Results:
    """What `ranks.run` promises, on the ranks that torchrun started."""
    if Recorder.current:
        raise CourseError("ranks.run was called inside a rank; call it from outside the ranks")
    _join(timeout)
    packed, entries = _call(fn, args, seed)
    told: list = [None] * dist.get_world_size()
    dist.all_gather_object(told, (packed, entries), group=_results_group)
    log = CollectiveLog(entries for _, entries in told)
    _compare(log, timeout)
    return Results([wire.unpack(packed) for packed, _ in told], log)


def _join(timeout: float) -> None:
    """Meet the other ranks; from the second call on, only wait for them."""
    global _results_group, _made_here
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if here == int(os.environ["WORLD_SIZE"]):
        ranks_half.use_loopback()
    if not dist.is_initialized():
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= here
        if gpus:
            torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
        _made_here = True
    if _results_group is None:
        _results_group = dist.new_group(backend="gloo")
    if _made_here:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    patience = timedelta(seconds=timeout + SLACK)
    dist.distributed_c10d._set_pg_timeout(patience, _results_group)
    dist.barrier(_results_group)


def _call(fn: Callable, args: tuple, seed: int | None) -> tuple[bytes, tuple[Entry, ...]]:
    """What the function returned on this rank, packed, and what the rank communicated."""
    rank = dist.get_rank()
    if seed is not None:
        ranks_half.seed_all(seed + rank)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        recorder = Recorder.start(rank, Path(folder, "log"))
        try:
            value = fn(*args)
        except Exception as error:
            outcome = ranks_half.raised(error)
            raise report.alone(rank, outcome, _last(recorder.entries())) from error
        finally:
            Recorder.current = None
        entries = recorder.entries()
    try:
        return wire.pack(value), entries
    except Exception as error:
        outcome = Unsendable(type(value).__name__, str(error))
        raise report.alone(rank, outcome, _last(entries)) from error


def _last(entries: tuple[Entry, ...]) -> Entry | None:
    return entries[-1] if entries else None


def _compare(log: CollectiveLog, timeout: float) -> None:
    """RankDesync where the ranks did not call the same collectives."""
    calls = Calls()
    for rank, entries in enumerate(log):
        calls.add(rank, entries)
    if verdict := calls.mismatch() or calls.absent(set(range(len(log)))):
        raise report.error([Returned(b"")] * len(log), timeout, verdict, log)
