"""How a rank's collectives come to be logged: from torch's dispatcher, where all of them pass.

Every collective, whoever calls it (Python, DDP's reducer in C++, FSDP, DeepSpeed), is one operator
`c10d::…` on its way to the backend. Here each of these operators gets a kernel at the key that
comes right before the backends, which writes an event, passes the call on to where it was going,
and writes another event when it is done. Operators do nothing at that key by themselves, so
nothing else changes.

Done is when the backend's future says so. A send or recv has no such future: it is done when a
wait for it returns. Waits are seen where they are called from Python: of what C++ waits for, only
the end is seen. The reduction (sum, max) is not seen, as the operator carries it in a form that
Python cannot read.
"""

import json
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from course_lib.errors import CourseError
from course_lib.ranks import stack
from course_lib.ranks.log import PAIRED, Entry
from course_lib.ranks.protocol import Frame
from course_lib.ranks.reader import MOST, Reader

KEY = "BackendSelect"
BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

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
    """Writes a rank's events to a file. Times are in seconds since `zero`, a time.monotonic()."""

    current: "Recorder | None" = None  # whom this process tells of its collectives
    _hooks: torch.library.Library | None = None

    def __init__(self, rank: int, path: Path, zero: float) -> None:
        self._rank, self._path, self._zero = rank, path, zero
        self._file = path.open("ab", buffering=0)
        self._groups: dict[str, list[int]] = {}
        self._next: Counter = Counter()
        self._index = 0
        self._works = weakref.WeakKeyDictionary()  # what waits for an entry: its index
        self._pending: dict[int, torch.futures.Future | None] = {}  # by index; None: send, recv
        self._latest = None  # kept, so that the caller is given the very object that we know
        self._threads = False  # have there been others than at the start?
        self._alone = threading.active_count()
        self._entering = threading.RLock()  # indices come to the file in order

    @classmethod
    def start(cls, rank: int, path: Path, zero: float | None = None) -> "Recorder":
        """From now on, log to a new file, counting from 1; times from now, without a `zero`."""
        cls._hooks = cls._hooks or _hook_up()
        cls.current = cls(rank, path, time.monotonic() if zero is None else zero)
        return cls.current

    def entries(self) -> tuple[Entry, ...]:
        """What this rank has issued so far."""
        self.settle()
        return Reader(self._rank, self._path).read()

    def settle(self) -> None:
        """Write the end of all that is done: C++ may know of it a moment before its callback."""
        for index, future in list(self._pending.items()):
            if future and future.done():
                self._done(index)

    def _enter(self, name: str, args: tuple) -> int | None:
        with self._entering:
            return self._entered(name, args)

    def _entered(self, name: str, args: tuple) -> int | None:
        if self._index >= MOST:
            return None
        self._note_thread()
        kind, buffer, group, peer = OPERATORS[name]
        members = self._members(group := dist.ProcessGroup.unbox(args[group]))
        tensors = [] if buffer is None else _tensors(args[buffer])
        elements = sum(tensor.numel() for tensor in tensors)
        if kind in ONE_OF_N:
            elements *= len(members)
        peer = None if peer is None else _named(members, args[peer], kind)
        tag = args[-1] if kind in PAIRED else 0
        dtype = tensors[0].dtype if tensors else torch.uint8
        counter = (group.group_name, kind, peer, tag) if kind in PAIRED else group.group_name
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
            tag,
            _learners_line(sys._getframe(3)),
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
        """See to it that its end is written, and let `wait` know what is waited for."""
        boxed = result[-1] if isinstance(result, tuple) else result
        if boxed is None:  # a monitored barrier returns when it is done
            self._write("done", index, self._now())
            return
        work = dist.Work.unbox(boxed)
        self._works[work] = index
        self._latest = work
        try:
            future = work.get_future()
        except RuntimeError:  # a send or recv
            self._pending[index] = None
        else:
            self._pending[index] = future
            future.add_done_callback(lambda _: self._done(index))

    def _done(self, index: int) -> None:
        future = self._pending.pop(index, ...)  # whoever takes it out, writes it
        if future is not ...:
            self._write("resume" if _failed(future) else "done", index, self._now())

    def _wait(self, wait, work, args, options):
        index = self._works.get(work)
        if self._latest is work:
            self._latest = None  # it would keep its tensors alive
        if index not in self._pending:
            return wait(work, *args, **options)
        self._note_thread()
        if not (args or options):  # a wait with a timeout of its own may end by that
            self._write("wait", index, self._now())
        try:
            result = wait(work, *args, **options)
            if self._pending.get(index, ...) is None:
                self._done(index)
            return result
        finally:
            if index in self._pending:
                self._write("resume", index, self._now())

    def _note_thread(self) -> None:
        """From where threads share the work on, a wait does not mean that the rank stands still."""
        if self._threads:
            return
        alone = threading.active_count() == self._alone
        if not alone or threading.current_thread() is not threading.main_thread():
            self._threads = True
            self._write("threads")

    def _now(self) -> float:
        return round(time.monotonic() - self._zero, 6)

    def _write(self, *event: object) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")


def _hook_up() -> torch.library.Library:
    """Tell the recorder of every collective and every wait, for as long as the library lives."""
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATORS:
        library.impl(name, _kernel(name), KEY, with_keyset=True)
    wait = dist.Work.wait

    def logged(work, *args, **options):
        if recorder := Recorder.current:
            return recorder._wait(wait, work, args, options)
        return wait(work, *args, **options)

    dist.Work.wait = logged
    return library


def _kernel(name: str):
    operator = getattr(torch.ops.c10d, name).default

    def kernel(keys, *args):
        recorder = Recorder.current
        index = recorder._enter(name, args) if recorder else None
        result = operator.redispatch(keys & BELOW, *args)
        if index is not None:
            recorder._follow(index, result)
        return result

    return kernel


def _failed(future: torch.futures.Future | None) -> bool:
    try:
        if future:
            future.value()
    except RuntimeError:
        return True
    return False


def _named(members: list[int], rank: int, kind: str) -> int:
    """The rank that a group knows by its own number.

    Gloo would wait for ever for a message to or from one that is not there.
    """
    if 0 <= rank < len(members):
        return members[rank]
    if kind in PAIRED:
        raise CourseError(
            f"{kind} was given rank {rank}, and the ranks are 0 to {len(members) - 1}: "
            f"count modulo {len(members)}."
        )
    return rank  # torch refuses it


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
