"""The peak of a step, predicted: the ledger's resident bytes, one micro-batch's work, and buffers.

A stage changes what a rank holds, not what it computes. So the events of one micro-batch, measured
in one process (see `work`), are replayed here under the rules of a stage: what is resident, which
gradients are kept, moved or freed, which buffers are there meanwhile, and what the update needs.
The peak is the most that ever comes together.

Two rules are not the stages' own. Gloo's reduce_scatter copies its whole input, out of sight, until
it is waited for, when an operator cuts the copy: there it counts, as `LiveBytes` counts it. On a
CPU, AdamW makes two temporaries of the size of the tensor that it updates, and SGD, where weights
decay, one.

As in the ledger, the rank is the one that holds most, and the step is not the first.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib import ledger
from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.comm.units import units
from course_lib.errors import CourseError
from course_lib.measure.work import Event
from course_lib.specs import DTYPE_BYTES, PRECISIONS, ModelSpec, Recipe, Strategy, TensorSpec
from course_lib.specs.padding import flat_shard

TEMPORARIES = {"adamw": 2, "sgd-momentum": 1, "sgd": 1}  # of what is updated at a time
UNDER_WAY = 2  # reduce_scatters at a time, in ZeRO-2 and 3
FP32 = DTYPE_BYTES["fp32"]


@dataclass(frozen=True)
class Peak:
    """`bytes` at once on a rank, and the event before which they were: its kind and its name."""

    bytes: int
    at: str


def predicted_peak(
    events: Sequence[Event],
    model: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch: int = 1,
) -> Peak:
    """The peak of one step of ddp, zero1, zero2 or zero3, in the implementations of this course.

    `events` are those of one micro-batch of the same model. Parameters with a 'gradient' among
    them are trained. Reduced is in the dtype of gradients; there is one group of parameters.
    """
    stages = {"ddp": _Ddp, "zero1": _Zero1, "zero2": _Zero2, "zero3": _Zero3}
    if strategy.name not in stages:
        raise CourseError(
            f"The peak was asked of {strategy.name}, and is predicted for {', '.join(stages)}: "
            "give one of these."
        )
    rank = stages[strategy.name](events, model, recipe, strategy, bucket_bytes, prefetch)
    for _ in range(recipe.grad_accum):
        for event in events:
            rank.see(event.most, f"{event.kind} {event.name}".strip())
            rank.on(event)
    rank.step()
    return rank.peak


class _Rank:
    """What a rank holds besides its work: `held` bytes now, and the peak so far."""

    def __init__(self, events, model, recipe, strategy, bucket_bytes, prefetch) -> None:
        precision = PRECISIONS[recipe.precision]
        self.ranks, self.prefetch = strategy.gpus, prefetch
        self.itemsize = DTYPE_BYTES[precision.parameters]
        self.has_masters = precision.master is not None
        self.temporaries = TEMPORARIES[recipe.optimizer]
        completed = {event.name for event in events if event.kind == "gradient"}
        self.sizes = {x.name: x.numel for x in model.tensors() if x.name in completed}  # trained
        self.shard = flat_shard(sum(self.sizes.values()), self.ranks)
        states = ledger.model_states(model, recipe, strategy)
        self.held = states.parameters + states.optimizer_states
        self.peak = Peak(0, "")
        self.prepare(events, model, strategy, bucket_bytes)

    def see(self, work: int, at: str) -> None:
        if self.held + work > self.peak.bytes:
            self.peak = Peak(self.held + work, at)

    def on(self, event: Event) -> None:
        if event.kind == "gradient":
            self.on_gradient(event)

    def update(self, elements: int, largest: int, besides: int = 0) -> None:
        """The optimizer's step on `elements`, the `largest` tensor of them at a time."""
        casts = elements if self.has_masters else 0  # of the gradients
        self.see(besides + FP32 * (casts + self.temporaries * largest), "update")


class _Ddp(_Rank):
    def prepare(self, events, model, strategy, bucket_bytes) -> None:
        self.held += self.itemsize * sum(self.sizes.values())  # the buckets, which stay

    def on_gradient(self, event: Event) -> None:
        """It goes into its bucket."""

    def step(self) -> None:
        self.update(sum(self.sizes.values()), max(self.sizes.values()))


class _Zero1(_Rank):
    def prepare(self, events, model, strategy, bucket_bytes) -> None:
        self.kept: set[str] = set()
        piece = max(bucket_bytes // self.itemsize // self.ranks, 1)
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
        self.see(copy + max(self.buckets), "all_gather")


class _Zero2(_Zero1):
    def prepare(self, events, model, strategy, bucket_bytes) -> None:
        super().prepare(events, model, strategy, bucket_bytes)
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


class _Zero3(_Rank):
    def prepare(self, events, model, strategy, bucket_bytes) -> None:
        self.units = [
            _Unit(unit.tensors, self.sizes, self.ranks, self.itemsize)
            for unit in units(model, strategy)
        ]
        self.of = {name: unit for unit in self.units for name in unit.names}  # of events' names
        entered = [x.name for x in events if x.kind == "enter"]
        if "lm_head" in entered:  # where its weight is tied, it has none of its own
            self.of.setdefault("lm_head", self.units[0])
        self.uses = Counter(self.of[x] for x in entered if x in self.of)
        self.calls = Counter()
        self.ends = {x.name for x in events if x.kind == "through"}
        order = [self.of[x.name] for x in events if x.kind == "leave" and x.name in self.of]
        self.forward = list(dict.fromkeys(self.of[x] for x in entered if x in self.of))
        self.backward = list(dict.fromkeys(reversed(order)))
        self.under_way: deque[_Unit] = deque()
        self.first = True  # micro-batch
        self.begin()

    def begin(self) -> None:
        """A micro-batch begins."""
        self.to_issue = deque(unit for unit in self.forward[::-1] if unit.trained)
        for unit in self.units:
            unit.awaited = set(unit.trained)
            unit.to_reach = unit.open = 0

    def on(self, event: Event) -> None:
        unit = self.of.get(event.name)
        if event.kind == "end":
            self.end(event.now)
        elif unit:
            getattr(self, f"on_{event.kind}")(unit, event)

    def on_enter(self, unit: "_Unit", event: Event) -> None:
        self.use(unit, self.forward, event.now)

    def on_leave(self, unit: "_Unit", event: Event) -> None:
        unit.to_reach += 1
        self.calls[unit] += 1
        if self.calls[unit] == self.uses[unit]:
            self.free(unit)

    def on_reach(self, unit: "_Unit", event: Event) -> None:
        unit.to_reach -= 1
        unit.open += event.name in self.ends
        self.use(unit, self.backward, event.now)

    def on_through(self, unit: "_Unit", event: Event) -> None:
        unit.open -= 1
        self.free_if_done(unit, event.now)

    def on_gradient(self, unit: "_Unit", event: Event) -> None:
        if not unit.has_buffer:
            unit.has_buffer = True
            self.held += unit.reduced
        self.see(event.now, "copy to where it is reduced")
        unit.awaited.remove(event.name)
        self.free_if_done(unit, event.now - self.itemsize * self.sizes[event.name])

    def use(self, unit: "_Unit", order: list["_Unit"], work: int) -> None:
        if unit.is_whole:
            return
        if not unit.is_coming:
            self.held += unit.whole
        self.held += unit.whole
        self.see(work, "copy out of what was gathered")
        self.held -= unit.whole
        unit.is_whole, unit.is_coming = True, False
        place = order.index(unit) + 1
        for other in order[place : place + self.prefetch]:
            if not other.is_whole and not other.is_coming:
                other.is_coming = True
                self.held += other.whole

    def free(self, unit: "_Unit") -> None:
        self.held -= unit.whole * (unit.is_whole + unit.is_coming)
        unit.is_whole = unit.is_coming = False

    def free_if_done(self, unit: "_Unit", work: int) -> None:
        if not unit.is_done:
            return
        self.free(unit)
        while self.to_issue and self.to_issue[0].is_done:
            if len(self.under_way) == UNDER_WAY:
                self.collect(work)
            self.under_way.append(self.to_issue.popleft())
            self.held += self.under_way[-1].reduced // self.ranks  # what comes back
            self.see(work, "reduce_scatter")

    def collect(self, work: int) -> None:
        unit = self.under_way.popleft()
        unit.has_buffer = False
        self.see(work + unit.reduced, "wait for a reduce_scatter")
        self.held -= unit.reduced
        if not self.first:  # else it is kept, as the shard of gradients
            self.held -= unit.reduced // self.ranks

    def end(self, work: int) -> None:
        for unit in self.units:
            self.free(unit)
        while self.under_way:
            self.collect(work)
        self.first = False
        self.calls.clear()
        self.begin()

    def step(self) -> None:
        shards = [flat_shard(size, self.ranks) for size in self.sizes.values()]
        self.update(sum(shards), max(shards))


class _Unit:
    """A unit of ZeRO-3: its bytes when it is whole, those that are reduced, and where it stands."""

    def __init__(self, tensors, trained: dict[str, int], ranks: int, itemsize: int) -> None:
        def padded(sizes: Iterable[int]) -> int:
            return itemsize * ranks * sum(flat_shard(size, ranks) for size in sizes)

        parameters = [x.name for x in tensors]
        self.names = {*parameters, *map(_module, tensors)}
        self.trained = [name for name in parameters if name in trained]
        self.whole = padded(x.numel for x in tensors)
        self.reduced = padded(trained[name] for name in self.trained)
        self.is_whole = self.is_coming = self.has_buffer = False

    @property
    def is_done(self) -> bool:
        return not self.awaited and not self.open and self.to_reach <= 0


def _module(tensor: TensorSpec) -> str:
    """The name of the block, or of the module beside the blocks, that has it."""
    if tensor.layer is None:
        return tensor.name.rpartition(".")[0]
    blocks, _, _ = tensor.name.partition(f".{tensor.layer}.")
    return f"{blocks}.{tensor.layer}"


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
