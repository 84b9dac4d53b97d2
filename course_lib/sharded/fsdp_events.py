"""What FSDP does and when: each event of a step, on this rank, with the state that it led to.

    with fsdp.recording() as events:
        model.loss(tokens).backward()

Compute, in the order in which the rank did it:

    forward, backward   a unit computes
    wait                compute stands still for a unit that is late: exposed communication
    copy out            out of the buffer that was gathered, into whole parameters
    copy in             gradients, into the buffer that is reduced
    reshard             whole parameters are freed (of no length)
    free                buffers of gradients are, what came being the shard's gradient (likewise)
    to device, to host  with offload: shards on their way

Communication, from when it was issued to when it was done:

    all_gather, reduce_scatter, all_reduce
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

COMMUNICATION = ("all_gather", "reduce_scatter", "all_reduce")
COMPUTE = ("forward", "backward", "wait", "copy out", "copy in", "reshard", "free")
COMPUTE += ("to device", "to host")


@dataclass
class Event:
    """One event. `bytes` is what it moved or freed, of buffers whole, 0 for compute.

    `start` and `end` are seconds since the recording began; `end` is None while it lasts. `state`
    and `held` are of the unit, once it has begun (of communication), or ended: 'sharded',
    'gathering', 'whole' or 'resharded', and the bytes that it holds beyond shards: what is whole,
    buffers, and whole gradients that wait in buffers.
    """

    kind: str
    unit: str
    bytes: int
    start: float
    end: float | None = None
    state: str = ""
    held: int = 0


class Events(list):
    """The events of a recording, in the order in which they began."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def begin(self, kind: str, unit, nbytes: int = 0) -> Event:
        event = Event(kind, unit.name, nbytes, self._now())
        self._settle(event, unit)
        self.append(event)
        return event

    def end(self, event: Event, unit=None) -> None:
        event.end = self._now()
        if unit is not None:
            self._settle(event, unit)

    @contextlib.contextmanager
    def span(self, kind: str, unit, nbytes: int = 0) -> Iterator[None]:
        event = self.begin(kind, unit, nbytes)
        yield
        self.end(event, unit)

    def moment(self, kind: str, unit, nbytes: int = 0) -> None:
        """An event of no length."""
        event = self.begin(kind, unit, nbytes)
        event.end = event.start

    def follow(self, kind: str, unit, nbytes: int, work: dist.Work) -> Event:
        """A collective, which ends when `work` is done; at the latest when `is_done` says so, as
        gloo does not tell of each."""
        event = self.begin(kind, unit, nbytes)
        with contextlib.suppress(RuntimeError):  # gloo has no future of a reduce_scatter
            work.get_future().add_done_callback(lambda _: self.is_done(event))
        return event

    def is_done(self, event: Event | None) -> None:
        """It has been waited for."""
        if event is not None and event.end is None:
            self.end(event)

    def _settle(self, event: Event, unit) -> None:
        event.state, event.held = unit.state, unit.held

    def _now(self) -> float:
        return time.perf_counter() - self._zero


class Nothing(Events):
    """Where nothing is recorded."""

    def begin(self, kind, unit, nbytes=0):
        return None

    def end(self, event, unit=None):
        pass

    def moment(self, kind, unit, nbytes=0):
        pass

    def follow(self, kind, unit, nbytes, work):
        return None

    def is_done(self, event):
        pass
