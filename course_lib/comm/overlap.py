"""How much of DDP's communication hides behind backward.

Backward finishes one gradient after another. It does not wait for the network: when a bucket is
full its all-reduce may start, and does as soon as the one before it is done, since they share the
links. So there are two lanes, compute and communication. What communication still has to do when
compute has ended is *exposed*: only that makes the step longer.

Two things cannot be hidden: the last bucket, which is full only when backward ends; and what the
network cannot carry in the time that backward takes. Small buckets make the last one small, but
each all-reduce pays its latency.

Left out: kernels that compete with communication for the GPU, which slows both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course_lib.comm.buckets import buckets


@dataclass(frozen=True)
class Gradient:
    """One tensor's gradient: the seconds of backward that compute it, and its bytes."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, in seconds since backward began, something works on `nbytes`."""

    start: float
    end: float
    nbytes: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Lanes:
    """`compute` has a span for each gradient, `communication` one for each bucket, in order."""

    compute: tuple[Span, ...]
    communication: tuple[Span, ...]

    @property
    def compute_end(self) -> float:
        """When backward would be over if nothing had to be sent."""
        return self.compute[-1].end if self.compute else 0.0

    @property
    def end(self) -> float:
        """When every gradient has been averaged."""
        return max(self.compute_end, self.communication[-1].end if self.communication else 0.0)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to backward."""
        return self.end - self.compute_end

    @property
    def busy(self) -> float:
        """Seconds for which something is being sent, hidden or not."""
        return sum(span.seconds for span in self.communication)


def overlap(gradients: Sequence[Gradient], cap: int, cost: Callable[[int], float]) -> Lanes:
    """The lanes of one backward. `gradients` stand in the order in which backward finishes them.

    `cap` is the buckets' in bytes, see comm.buckets; `cost` gives the seconds of an all-reduce of
    so many bytes. Raises CourseError where `cap` is not a whole number of bytes.
    """
    compute: list[Span] = []
    communication: list[Span] = []
    clock = free = 0.0
    for bucket in buckets([gradient.nbytes for gradient in gradients], cap):
        for index in bucket:
            begun, clock = clock, clock + gradients[index].seconds
            compute.append(Span(begun, clock, gradients[index].nbytes))
        nbytes = sum(gradients[index].nbytes for index in bucket)
        start = max(clock, free)  # full, and the links are free
        free = start + cost(nbytes)
        communication.append(Span(start, free, nbytes))
    return Lanes(tuple(compute), tuple(communication))
