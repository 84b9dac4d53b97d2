"""What a rank of ddp, zero1 or zero2 holds, event by event: see `peak`, which replays them.

Two rules are not the stages' own. `copies`: gloo's reduce_scatter copies its whole input, out of
sight, until it is waited for, when an operator cuts the copy: there it counts, as `LiveBytes`
counts it. NCCL's copies nothing. And `update`, in PyTorch 2.13: AdamW that updates tensors one by
one makes two temporaries of each, while one of the tensor before is still there; SGD, where weights
decay, makes one; 'foreach' makes one of all tensors at a time; 'fused' none.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from course_lib.comm.buckets import UNDER_WAY, flat_piece
from course_lib.comm.units import HEAD, ROOT, plain
from course_lib.ledger.palette import CATEGORIES
from course_lib.ledger.states import model_states
from course_lib.ledger.tape import NAMES
from course_lib.ledger.tuning import Tuning
from course_lib.ledger.work import Event
from course_lib.specs import DTYPE_BYTES, PRECISIONS
from course_lib.specs.padding import flat_shard
from course_lib.specs.recipe import GRADIENTS, OPTIMIZER_STATES, PARAMETERS

GATHER, REDUCE, OTHER = "gather_buffers", "reduce_buffers", "other"
FP32 = DTYPE_BYTES["fp32"]


@dataclass(frozen=True)
class Peak:
    """`bytes` at once on a rank, and the event before which they were: its kind and its name.

    `by_category` tells them apart, in the order of ledger.CATEGORIES. `apart` is what it would be
    if nothing ever took memory that something of another kind has let go: the most of each kind,
    added up.
    """

    bytes: int
    at: str
    by_category: dict[str, int] = field(default_factory=dict, compare=False)
    apart: int = field(default=0, compare=False)

    @property
    def when(self) -> str:
        """Where in the step it is, in words."""
        kind, _, name = self.at.partition(" ")
        if kind == "reach" and name in (ROOT, HEAD):
            return "in the loss's backward"
        where = name or "the model"
        return {
            "enter": f"in forward, before {where}",
            "leave": f"in forward, in {where}",
            "loss": "in the loss",
            "reach": f"in backward, before it reaches {where}",
            "through": f"in backward of {where}",
            "gradient": f"in backward, at the gradient of {where}",
            "end": "at the end of backward",
            "update": "in the optimizer's step",
        }.get(kind, f"here: {self.at}")


def raised(tops: Counter, now: Mapping[str, int]) -> None:
    """`tops`, where `now` is higher."""
    for name, nbytes in now.items():
        if nbytes > tops[name]:
            tops[name] = nbytes


class Rank:
    """What a rank holds besides its work: `held` now, by category, and the peak so far."""

    def __init__(self, events, model, recipe, strategy, tuning: Tuning) -> None:
        precision = PRECISIONS[recipe.precision]
        self.ranks, self.prefetch = strategy.gpus, tuning.prefetch
        self.itemsize = DTYPE_BYTES[precision.parameters]
        self.has_masters = precision.master is not None
        self.optimizer, self.tuning = recipe.optimizer, tuning
        completed = {plain(event.name) for event in events if event.kind == "gradient"}
        self.sizes = {  # of what is trained
            x.name: round(tuning.trained * x.numel) for x in model.tensors() if x.name in completed
        }
        self.shard = flat_shard(sum(self.sizes.values()), self.ranks)
        self.states = model_states(model, recipe, strategy)
        self.held = Counter({x: self.states.of(x) for x in (PARAMETERS, OPTIMIZER_STATES)})
        self.work: Event | None = None
        self.most, self.at, self.parts = 0, "", ({}, 0, None)
        self.tops: Counter = Counter()  # the most of each kind by itself
        self.moments: list[Peak] | None = None  # of each event, if they are wanted
        self.prepare(events, model, recipe, strategy, tuning)

    @property
    def peak(self) -> Peak:
        """The peak so far."""
        apart = max(self.most, sum(self.tops.values()))
        return Peak(self.most, self.at, self.by_category(self.most, *self.parts), apart)

    def by_category(self, total: int, held: dict, work: int, event: Event | None) -> dict:
        """What `total` bytes are, as far as it is known; else they are other."""
        parts = dict.fromkeys(CATEGORIES, 0) | held
        if event and event.split:
            split = event.split if work >= event.most else event.live
            for name, nbytes in zip(NAMES, split, strict=True):
                parts[name] += nbytes
        parts[OTHER] += total - sum(parts.values())
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

    def see(self, work: int, at: str, besides: int = 0) -> None:
        """There are `work` bytes of this micro-batch's work, and `besides` for a moment."""
        total = self.all_held + work + besides
        if total > self.most:
            self.most, self.at, self.parts = total, at, (self.in_all(), work, self.work)
        if self.moments is not None:
            parts = self.by_category(total, self.in_all(), work, self.work)
            self.moments.append(Peak(total, at, parts))

    @property
    def all_held(self) -> int:
        """Bytes of what is held."""
        return sum(self.held.values())

    def in_all(self) -> dict[str, int]:
        """What is held, by category."""
        return dict(self.held)

    def begins(self, last: bool) -> None:
        """A micro-batch begins, perhaps the last of the step."""

    def run(self, event: Event) -> None:
        """What happens up to an event, and at it."""
        self.work = event
        self.see(event.most, f"{event.kind} {event.name}".strip())
        raised(self.tops, self.held)
        raised(self.tops, dict(zip(NAMES, event.split, strict=False)))
        self.on(event)

    def on(self, event: Event) -> None:
        if event.kind == "gradient":
            self.on_gradient(event)

    def finish(self) -> None:
        """Of the last micro-batch nothing is left; the step begins."""
        self.work = None
        self.step()

    def update(self, sizes: Sequence[int], besides: int = 0) -> None:
        """The optimizer's step on tensors of `sizes` elements, in its order."""
        elements = sum(sizes)
        if not elements:
            return
        casts = elements if self.has_masters else 0  # of the gradients
        width = FP32 if self.has_masters else self.itemsize
        match self.tuning.update:
            case "one by one" if self.optimizer.startswith("adamw"):
                # Of the tensor before, one is still there.
                temporaries = max(a + 2 * b for a, b in pairwise((0, *sizes)))
            case "one by one":
                temporaries = max(sizes)
            case "foreach":
                temporaries = elements
            case _:
                temporaries = 0
        besides += width * (casts + temporaries)
        self.tops["update"] = max(besides, self.tops["update"])
        self.see(0, "update", besides)


class Ddp(Rank):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        self.held[GRADIENTS] += self.itemsize * sum(self.sizes.values())  # the buckets, which stay

    def on_gradient(self, event: Event) -> None:
        """It goes into its bucket."""

    def step(self) -> None:
        self.update(list(self.sizes.values()))


class Zero1(Rank):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        self.kept: set[str] = set()
        piece = flat_piece(tuning.bucket_bytes, self.itemsize, self.ranks)
        pieces = [min(piece, self.shard - x) for x in range(0, self.shard, piece)]
        self.buckets = [self.ranks * piece * self.itemsize for piece in pieces]  # bytes

    def on_gradient(self, event: Event) -> None:
        if event.name not in self.kept:
            self.kept.add(event.name)
            self.held[GRADIENTS] += self.itemsize * self.sizes[event.name]

    def step(self) -> None:
        self.held[REDUCE] += self.itemsize * self.shard  # of the mean gradients
        self.see(0, "reduce_scatter", (1 + self.tuning.copies) * max(self.buckets))
        self.step_on_shard()

    def step_on_shard(self) -> None:
        copy = 0 if self.has_masters else FP32 * self.shard  # of what is updated
        self.update([self.shard], copy)
        # Gathered into the parameters themselves, but for a last bucket with padding.
        padded = self.ranks * self.shard > sum(self.sizes.values())
        self.see(0, "all_gather", copy + padded * self.buckets[-1])


class Zero2(Zero1):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        super().prepare(events, model, recipe, strategy, tuning)
        self.held[GRADIENTS] += self.itemsize * self.shard
        self.places = _places(self.sizes, [x // self.itemsize for x in self.buckets])
        self.begin()

    def begin(self) -> None:
        """A micro-batch's backward begins."""
        self.to_come = Counter(i for place in self.places.values() for i in place)
        self.unfilled = len(self.to_come)
        self.filling: set[int] = set()
        self.under_way: deque[int] = deque()

    def on_gradient(self, event: Event) -> None:
        for bucket in self.places[event.name]:
            if bucket not in self.filling:
                self.filling.add(bucket)
                self.held[REDUCE] += self.buckets[bucket]
            self.see(event.now, "copy into a bucket")
            self.to_come[bucket] -= 1
            if not self.to_come[bucket]:
                self.unfilled -= 1
                self.issue(bucket, event.now)
        work = event.now - self.itemsize * self.sizes[event.name]
        if not self.unfilled:
            while self.under_way:
                self.collect(work)
            self.begin()

    def issue(self, bucket: int, work: int) -> None:
        if len(self.under_way) == UNDER_WAY:
            self.collect(work)
        self.under_way.append(bucket)
        self.held[REDUCE] += self.buckets[bucket] // self.ranks  # the piece that comes back
        self.see(work, "reduce_scatter")

    def collect(self, work: int) -> None:
        size = self.buckets[self.under_way.popleft()]
        self.see(work, "wait for a reduce_scatter", size * self.tuning.copies)
        self.held[REDUCE] -= size + size // self.ranks

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
        places[name] = range(bisect_right(ends, start), bisect_left(ends, stop) + 1)
        start = stop
    return places
