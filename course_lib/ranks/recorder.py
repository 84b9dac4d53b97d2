"""How a rank's collectives come to be logged: from torch's dispatcher, where all of them pass.

Every collective, whoever calls it (Python, DDP's reducer in C++, FSDP, DeepSpeed), is one operator
`c10d::…` on its way to the backend. Here each of these operators gets a kernel at the Autograd
key, which writes an event, passes the call on to where it was going, and writes another event when
it is done. Operators do nothing at that key by themselves, so nothing else changes.

Done is when the backend's future says so. A send or recv has no such future: it is done when a
wait for it returns. Under `torch.inference_mode` operators pass by the Autograd key: collectives
called there are not seen (under `torch.no_grad` they are). The reduction (sum, max) is not seen
either, as the operator carries it in a form that Python cannot read.
"""

import json
import os
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from course_lib.ranks import stack
from course_lib.ranks.log import Entry, Reader
from course_lib.ranks.protocol import Frame

KEYS = ("AutogradCPU", "AutogradCUDA")
MOST = 200_000  # entries of one rank; what comes after is not logged

# operator: kind, which arguments hold the whole buffer, the group, and the root or other rank
OPERATORS = {
    "allreduce_": ("all_reduce", 0, 1, None),
    "allreduce_coalesced_": ("all_reduce", 0, 1, None),
    "allgather_": ("all_gather", 0, 2, None),
    "_allgather_base_": ("all_gather", 0, 2, None),
    "allgather_coalesced_": ("all_gather", 0, 2, None),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 2, None),
    "reduce_scatter_": ("reduce_scatter", 1, 2, None),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2, None),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2, None),
    "alltoall_": ("all_to_all", 1, 2, None),
    "alltoall_base_": ("all_to_all", 1, 2, None),
    "broadcast_": ("broadcast", 0, 1, 2),
    "reduce_": ("reduce", 0, 1, 3),
    "gather_": ("gather", 1, 2, 3),
    "scatter_": ("scatter", 0, 2, 3),
    "send": ("send", 0, 1, 2),
    "recv_": ("recv", 0, 1, 2),
    "recv_any_source_": ("recv", 0, 1, None),
    "barrier": ("barrier", None, 1, None),
    "monitored_barrier_": ("barrier", None, 1, None),
}
ONE_OF_N = ("gather", "scatter")  # their argument is one rank's part: only the root has the whole


class Recorder:
    """Writes this rank's events to `path`. Times are seconds from `zero`, a time.monotonic()."""

    def __init__(self, rank: int, path: Path, zero: float) -> None:
        self._rank, self._path, self._zero = rank, path, zero
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._library = torch.library.Library("c10d", "IMPL")
        self._groups: dict[str, list[int]] = {}
        self._next: Counter = Counter()
        self._index = 0
        self._works = weakref.WeakKeyDictionary()  # what waits for an entry: its index
        self._latest = None  # kept, so that the caller is given the very object that we know

    def install(self) -> None:
        """From now on, log."""
        for name in OPERATORS:
            for key in KEYS:
                self._library.impl(name, self._kernel(name), key, with_keyset=True)
        self._log_waits()

    def entries(self) -> tuple[Entry, ...]:
        """What this rank has issued so far."""
        return Reader(self._rank, self._path).read()

    def _kernel(self, name: str):
        operator = getattr(torch.ops.c10d, name).default
        below = torch._C._after_autograd_keyset

        def kernel(keys, *args):
            index = self._enter(name, args)
            result = operator.redispatch(keys & below, *args)
            if index is not None:
                self._follow(index, result)
            return result

        return kernel

    def _enter(self, name: str, args: tuple) -> int | None:
        if self._index >= MOST:
            return None
        kind, buffer, group, peer = OPERATORS[name]
        members = self._members(group := dist.ProcessGroup.unbox(args[group]))
        tensors = [] if buffer is None else _tensors(args[buffer])
        elements = sum(tensor.numel() for tensor in tensors)
        if kind in ONE_OF_N:
            elements *= len(members)
        peer = None if peer is None else members[args[peer]]
        dtype = tensors[0].dtype if tensors else torch.uint8
        counter = (group.group_name, kind, peer) if kind in ("send", "recv") else group.group_name
        self._next[counter] += 1
        index, self._index = self._index, self._index + 1
        self._write(
            "enter",
            index,
            group.group_name,
            self._next[counter],
            kind,
            elements,
            str(dtype).removeprefix("torch."),
            dtype.itemsize,
            peer,
            _learners_line(sys._getframe(2)),
            self._now(),
        )
        return index

    def _members(self, group: dist.ProcessGroup) -> list[int]:
        if group.group_name not in self._groups:
            members = dist.get_process_group_ranks(group)
            self._groups[group.group_name] = members
            self._write("group", group.group_name, members)
        return self._groups[group.group_name]

    def _follow(self, index: int, result: object) -> None:
        """Write when it is done, and let `wait` know which entry is waited for."""
        boxed = result[-1] if isinstance(result, tuple) else result
        if boxed is None:  # a monitored barrier returns when it is done
            self._write("done", index, self._now())
            return
        work = dist.Work.unbox(boxed)
        try:
            future = work.get_future()
        except RuntimeError:  # a send or recv: `wait` writes it
            self._works[work] = index, True
        else:
            self._works[work] = index, False
            future.add_done_callback(lambda _: self._write("done", index, self._now()))
        self._latest = work

    def _log_waits(self) -> None:
        wait = dist.Work.wait

        def logged(work, *args, **options):
            index, ends_here = self._works.get(work, (None, False))
            if index is None:
                return wait(work, *args, **options)
            self._write("wait", index, self._now())
            result = wait(work, *args, **options)
            if ends_here:
                self._write("done", index, self._now())
                del self._works[work]
            return result

        dist.Work.wait = logged

    def _now(self) -> float:
        return round(time.monotonic() - self._zero, 6)

    def _write(self, *event: object) -> None:
        os.write(self._file, json.dumps(event, separators=(",", ":")).encode() + b"\n")


def _tensors(argument: object) -> list[torch.Tensor]:
    """All tensors in an argument: a tensor, a list of them, or a list of lists."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for item in argument for tensor in _tensors(item)]


def _learners_line(frame: FrameType | None) -> list | None:
    while frame:
        found = Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if stack.learners(found):
            return [found.file, found.line, found.function]
        frame = frame.f_back
    return None
