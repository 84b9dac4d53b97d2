"""What one rank does, from its birth in the forkserver to its end.

It lets nothing leak (prints and native warnings go to a file of its own), prepares to be asked
where it is, joins the process group, calls the learner's function and reports one outcome over
its pipe. Then it waits: another rank may still need its half of a connection. It leaves when the
parent closes the pipe, which also happens when the parent dies, whatever the rank is doing then.
"""

import contextlib
import faulthandler
import os
import random
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist

from course_lib.ranks import wire
from course_lib.ranks.protocol import Frame, Job, Outcome, Raised, Returned, Unsendable
from course_lib.ranks.recorder import Recorder

SLACK = 60.0  # seconds after the parent's deadline: torch's own limits must not come first


def main(rank: int, job: Job, pipe: connection.Connection) -> None:
    """Be rank `rank` of `job`, report one outcome over `pipe`, leave when the parent closes it."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C is for the parent; and what this rank starts can be ended with it
    _capture(job.output(rank))
    threading.Thread(target=_leave_with_parent, args=(pipe,), daemon=True).start()
    _listen(job.where(rank), job.timeout + SLACK)
    try:
        outcome = _work(rank, job)
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too, end this rank only
        outcome = raised(error)
    with contextlib.suppress(Exception):  # the function may have closed it
        sys.stdout.flush()
    pipe.send(outcome)
    threading.Event().wait()


def _work(rank: int, job: Job) -> Outcome:
    os.environ.clear()
    os.environ.update(job.environment)
    # What torchrun tells its ranks: DeepSpeed and many a script ask for it.
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size}
    os.environ.update({name: str(number) for name, number in told.items()})
    fn, args = wire.unpack(job.work)
    torch.set_num_threads(max(1, _cores() // job.world_size))
    seed_all(None if job.seed is None else job.seed + rank)
    _join(rank, job)
    recorder = Recorder.start(rank, job.log(rank), job.zero)
    value = fn(*args)
    recorder.settle()
    try:
        return Returned(wire.pack(value))
    except Exception as error:
        return Unsendable(type(value).__name__, str(error))


def _join(rank: int, job: Job) -> None:
    """Meet the other ranks: gloo over the loopback device, rendezvous in a file."""
    use_loopback()
    dist.set_debug_level_from_env()  # torch read it before this run's environment was there
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(job.folder / "rendezvous"), job.world_size),
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + SLACK),
    )
    dist.barrier()  # nobody begins, and perhaps ends, while others still connect


def use_loopback() -> None:
    """Where all ranks are on this machine, gloo need not find out the machine's own name."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in names & {"lo", "lo0"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _capture(path: Path) -> None:
    """Send file descriptors 1 and 2, and Python's streams, to one file, line by line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(fd: int) -> TextIO:
    return os.fdopen(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _leave_with_parent(pipe: connection.Connection) -> None:
    connection.wait([pipe])  # the parent never writes: readable means closed
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # and whatever this rank started
    os._exit(0)


def _listen(path: Path, last_resort: float) -> None:
    """Write all stacks on SIGUSR1, even while blocked in C; leave after `last_resort` seconds."""
    file = open(path, "w")  # noqa: SIM115 (open as long as this process lives)
    file.write(f"{threading.get_ident():x}\n")
    file.flush()
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.dump_traceback_later(last_resort, exit=True, file=file)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def seed_all(seed: int | None) -> None:
    """Seed torch, numpy and random; with None from chance, as in a new process."""
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)
    torch.seed() if seed is None else torch.manual_seed(seed)


def raised(error: BaseException) -> Raised:
    """The outcome of a rank whose function ended with this exception."""
    stack = traceback.walk_tb(error.__traceback__)
    frames = (Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack)
    return Raised(type(error).__name__, _message(error), tuple(frames), _packed(error))


def _message(error: BaseException) -> str:
    try:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    except BaseException:
        return "(its message cannot be shown)"


def _packed(error: BaseException) -> bytes | None:
    """The exception itself, if it survives the journey."""
    try:
        packed = wire.pack(error)
        wire.unpack(packed)
    except BaseException:
        return None
    return packed
