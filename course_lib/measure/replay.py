"""What a rank of ddp, zero1 or zero2 holds, event by event: see `peak`, which replays them.

Two rules are not the stages' own. Gloo's reduce_scatter copies its whole input, out of sight, until
it is waited for, when an operator cuts the copy: there it counts, as `LiveBytes` counts it. On a
CPU, AdamW makes two temporaries of the size of the tensor that it updates, and SGD, where weights
decay, one.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from course_lib import ledger
from course_lib.comm.buckets import BUCKET_BYTES, UNDER_WAY, flat_piece
from course_lib.comm.units import plain
from course_lib.measure.work import Event
from course_lib.specs import DTYPE_BYTES, PRECISIONS
from course_lib.specs.padding import flat_shard

TEMPORARIES = {"adamw": 2, "sgd-momentum": 1, "sgd": 1}  # of what is updated at a time
FP32 = DTYPE_BYTES["fp32"]


@dataclass(frozen=True)
class Tuning:
    """How a stage is run, beyond what a Strategy says.

    `bucket_bytes` is of zero1 and zero2. `prefetch` is how many units zero3, fsdp and hsdp send for
    ahead of use. All else is of fsdp and hsdp, and where it has a name of sharded.FSDP's, it is as
    there: `forward_prefetch` and `backward_prefetch` are in place of `prefetch`; `units` by hand
    are names as in named_modules(); `reduce` is the dtype in which to reduce; `no_sync` is until
    the last micro-batch. `host`: what is offloaded counts, too, as where the device is the host.
    """

    bucket_bytes: int = BUCKET_BYTES
    prefetch: int = 1
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    gathers: int = 2
    units: Collection[str] | None = None
    reduce: str | None = None
    no_sync: bool = False
    recompute_reshards: bool = False
    host: bool = False

    @property
    def ahead(self) -> tuple[int, int]:
        """How many units are sent for ahead of use in forward, and in backward."""
        both = (self.forward_prefetch, self.backward_prefetch)
        return tuple(self.prefetch if count is None else count for count in both)


@dataclass(frozen=True)
class Peak:
    """`bytes` at once on a rank, and the event before which they were: its kind and its name."""

    bytes: int
    at: str


class Rank:
    """What a rank holds besides its work: `held` bytes now, and the peak so far."""

    def __init__(self, events, model, recipe, strategy, tuning: Tuning) -> None:
        precision = PRECISIONS[recipe.precision]
        self.ranks, self.prefetch = strategy.gpus, tuning.prefetch
        self.itemsize = DTYPE_BYTES[precision.parameters]
        self.has_masters = precision.master is not None
        self.temporaries = TEMPORARIES[recipe.optimizer]
        completed = {plain(event.name) for event in events if event.kind == "gradient"}
        self.sizes = {x.name: x.numel for x in model.tensors() if x.name in completed}  # trained
        self.shard = flat_shard(sum(self.sizes.values()), self.ranks)
        self.states = ledger.model_states(model, recipe, strategy)
        self.held = self.states.parameters + self.states.optimizer_states
        self.peak = Peak(0, "")
        self.prepare(events, model, recipe, strategy, tuning)

    def see(self, work: int, at: str) -> None:
        if self.held + work > self.peak.bytes:
            self.peak = Peak(self.held + work, at)

    def begins(self, last: bool) -> None:
        """A micro-batch begins, perhaps the last of the step."""

    def on(self, event: Event) -> None:
        if event.kind == "gradient":
            self.on_gradient(event)

    def update(self, elements: int, largest: int, besides: int = 0) -> None:
        """The optimizer's step on `elements`, the `largest` tensor of them at a time."""
        casts = elements if self.has_masters else 0  # of the gradients
        width = FP32 if self.has_masters else self.itemsize
        self.see(besides + width * (casts + self.temporaries * largest), "update")


class Ddp(Rank):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        self.held += self.itemsize * sum(self.sizes.values())  # the buckets, which stay

    def on_gradient(self, event: Event) -> None:
        """It goes into its bucket."""

    def step(self) -> None:
        self.update(sum(self.sizes.values()), max(self.sizes.values()))


class Zero1(Rank):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        self.kept: set[str] = set()
        piece = flat_piece(tuning.bucket_bytes, self.itemsize, self.ranks)
        pieces = [min(piece, self.shard - x) for x in range(0, self.shard, piece)]
        self.buckets = [self.ranks * piece * self.itemsize for piece in pieces]  # bytes

    def on_gradient(self, event: Event) -> None:
        if event.name not in self.kept:
            self.kept.add(event.name)
            self.held += self.itemsize * self.sizes[event.name]

    def step(self) -> None:
        self.held += self.itemsize * self.shard  # of the mean gradients
        self.see(2 * max(self.buckets), "reduce_scatter")  # a bucket, and gloo's copy of it
        self.step_on_shard()

    def step_on_shard(self) -> None:
        copy = 0 if self.has_masters else FP32 * self.shard  # of what is updated
        self.update(self.shard, self.shard, copy)
        # Gathered into the parameters themselves, but for a last bucket with padding.
        padded = self.ranks * self.shard > sum(self.sizes.values())
        self.see(copy + padded * self.buckets[-1], "all_gather")


class Zero2(Zero1):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        super().prepare(events, model, recipe, strategy, tuning)
        self.held += self.itemsize * self.shard  # gradients
        self.places = _places(self.sizes, [x // self.itemsize for x in self.buckets])
        self.begin()

    def begin(self) -> None:
        """A micro-batch's backward begins."""
        self.to_come = Counter(i for place in self.places.values() for i in place)
        self.filling: set[int] = set()
        self.under_way: deque[int] = deque()

    def on_gradient(self, event: Event) -> None:
        for bucket in self.places[event.name]:
            if bucket not in self.filling:
                self.filling.add(bucket)
                self.held += self.buckets[bucket]
            self.see(event.now, "copy into a bucket")
            self.to_come[bucket] -= 1
            if not self.to_come[bucket]:
                self.issue(bucket, event.now)
        work = event.now - self.itemsize * self.sizes[event.name]
        if not any(self.to_come.values()):
            while self.under_way:
                self.collect(work)
            self.begin()

    def issue(self, bucket: int, work: int) -> None:
        if len(self.under_way) == UNDER_WAY:
            self.collect(work)
        self.under_way.append(bucket)
        self.held += self.buckets[bucket] // self.ranks  # the piece that comes back
        self.see(work, "reduce_scatter")

    def collect(self, work: int) -> None:
        size = self.buckets[self.under_way.popleft()]
        self.see(work + size, "wait for a reduce_scatter")
        self.held -= size + size // self.ranks

    def step(self) -> None:
        self.step_on_shard()


def _places(sizes: dict[str, int], buckets: list[int]) -> dict[str, range]:
    """Which buckets a tensor has a part in; `buckets` are their elements, of the flat space."""
    ends, total = [], 0
    for size in buckets:
        total += size
        ends.append(total)
    places, start = {}, 0
    for name, size in reversed(sizes.items()):  # about as backward completes them
        stop = start + size
        first = next(i for i, end in enumerate(ends) if end > start)
        last = next(i for i, end in enumerate(ends) if end >= stop)
        places[name] = range(first, last + 1)
        start = stop
    return places
