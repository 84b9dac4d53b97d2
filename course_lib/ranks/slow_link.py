"""A slower link than this machine's memory, for what a fast one does not show.

    with slow_link(bandwidth=200e6, latency=1e-3):  # inside a rank; bytes a second, seconds
        model.loss(tokens).backward()

Ranks of one machine talk through its memory, so that nearly all communication hides behind compute.
In here each collective is done when two things are true: it really is, and a link of its own would
have carried it. Such a link has each rank, to its right neighbour in the ring. It carries one
collective after another, in the order of issue, and each takes

    latency + bytes per rank / bandwidth      (bytes as specs.Collective counts them)

So a collective that is issued at time t on a link which is busy until b is done at max(t, b) plus
that, or when the other ranks have done their part, whichever is later.

Nothing is computed meanwhile for the sake of slowness: the real collective runs at once, as ever; a
thread sleeps until the time has come, and then completes the future that the collective's Work
shows. Who waits for the Work sleeps, and leaves the processor to others, as a rank that waits for
its network does. Who computes goes on. The log, and whatever follows the future, see the late end.

(Gloo's reduce_scatter does its last part only when it is waited for, and has no future: the one
that is shown here is done when the link is.)

Not slowed are barriers, sends and receives, and what is waited for from C++ (the reducer of
torch's DDP). With `node=n` neither are collectives among ranks of one node, each n ranks that
follow one another: the slow link is then that between nodes.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from course_lib.errors import CourseError
from course_lib.ranks.recorder import Recorder
from course_lib.specs import Collective
from course_lib.specs.checking import whole

FREE = ("barrier", "send", "recv")


@contextlib.contextmanager
def slow_link(*, bandwidth: float, latency: float = 0.0, node: int = 1) -> Iterator[None]:
    """In here this rank's link has `bandwidth` bytes a second and `latency` seconds a collective.

    All ranks should enter it. It is left when all that was issued in here is done. Errors:
    CourseError outside of a rank, within another slow link, and for numbers that are no link's.
    """
    recorder = Recorder.current
    if recorder is None or isinstance(recorder, _Slowed):
        where = "outside of a rank" if recorder is None else "within another slow link"
        raise CourseError(
            f"slow_link was entered {where}: enter it once, in the function that ranks.run runs."
        )
    if not 0 < bandwidth < float("inf") or not 0 <= latency < float("inf"):
        raise CourseError(
            f"slow_link was given a bandwidth of {bandwidth!r} and a latency of {latency!r}: give "
            "bytes a second, more than 0, and seconds, 0 or more."
        )
    whole("node", node)
    link, get_future = _Link(bandwidth, latency, node), dist.Work.get_future
    dist.Work.get_future = lambda work: link.late[work] if work in link.late else get_future(work)
    Recorder.current = _Slowed(recorder, link)
    try:
        yield
        link.carry_the_rest()
    finally:
        Recorder.current, dist.Work.get_future = recorder, get_future
        recorder._alone -= 1
        link.end()


class _Link:
    """Says when each collective is through. `late` has the future of each Work that is slowed."""

    def __init__(self, bandwidth: float, latency: float, node: int) -> None:
        self.late = weakref.WeakKeyDictionary()
        self._bandwidth, self._latency, self._node = bandwidth, latency, node
        self._busy_until = 0.0
        self._under_way = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def book(self, collective: Collective, members: Sequence[int]) -> float | None:
        """When a collective that is issued now is through; None where it is not slowed."""
        within = len({rank // self._node for rank in members}) == 1
        if collective.kind in FREE or within:
            return None
        start = max(time.monotonic(), self._busy_until)
        took = self._latency + collective.bytes_per_rank / self._bandwidth
        self._busy_until = start + took
        return self._busy_until

    def follow(self, work: dist.Work, due: float) -> None:
        try:
            real = work.get_future()
        except RuntimeError:  # gloo's reduce_scatter
            real = None
        self.late[work] = torch.futures.Future()
        self._under_way.put((due, real, self.late[work]))

    def carry_the_rest(self) -> None:
        self.end()
        self._thread.join()

    def end(self) -> None:
        self._under_way.put(None)

    def _carry(self) -> None:
        while (item := self._under_way.get()) is not None:
            due, real, late = item
            time.sleep(max(0.0, due - time.monotonic()))
            error = _error(real)
            del item, real  # they would keep its buffer alive
            if error is None:
                late.set_result(None)
            else:
                late.set_exception(error)


class _Slowed(Recorder):
    """A recorder that goes on with another's log, and slows what it sees: all collectives pass it,
    when they are issued and where they are waited for."""

    def __init__(self, recorder: Recorder, link: _Link) -> None:
        self.__dict__ = recorder.__dict__  # one log
        self._alone += 1  # the link's thread shares no work
        self._link, self._due = link, {}

    def _write(self, *event: object) -> None:
        super()._write(*event)
        if event[0] == "enter":
            _, index, group, _, kind, elements, _, itemsize, *_ = event
            members = self._groups[group]
            collective = Collective(kind, elements, itemsize, len(members))
            self._due[index] = self._link.book(collective, members)

    def _follow(self, index: int, result: object) -> None:
        due = self._due.pop(index)
        if due is not None:
            boxed = result[-1] if isinstance(result, tuple) else result
            work = dist.Work.unbox(boxed)
            self._link.follow(work, due)
        super()._follow(index, result)

    def _wait(self, wait, work, args, options):
        late = self._link.late.get(work)

        def both(work, *args, **options):
            result = wait(work, *args, **options)
            late.wait()
            return result

        return super()._wait(wait if late is None else both, work, args, options)


def _error(future: torch.futures.Future | None) -> Exception | None:
    """Wait for it: None where all is well."""
    try:
        if future is not None:
            future.wait()
    except RuntimeError as error:
        return error
    return None
