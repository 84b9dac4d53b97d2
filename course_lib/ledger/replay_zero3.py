"""What a rank of zero3 holds, event by event: units come and go. See `peak`, which replays them."""

from collections import Counter, deque
from collections.abc import Iterable

from course_lib.comm.buckets import UNDER_WAY
from course_lib.comm.units import HEAD, units
from course_lib.ledger.replay import GATHER, REDUCE, Rank
from course_lib.ledger.work import Event
from course_lib.specs import TensorSpec
from course_lib.specs.padding import flat_shard
from course_lib.specs.recipe import GRADIENTS


class Zero3(Rank):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        self.units = [
            _Unit(unit.tensors, self.sizes, self.ranks, self.itemsize)
            for unit in units(model, strategy)
        ]
        self.of = {name: unit for unit in self.units for name in unit.names}  # of events' names
        entered = [x.name for x in events if x.kind == "enter"]
        if HEAD in entered:  # where its weight is tied, it has none of its own
            self.of.setdefault(HEAD, self.units[0])
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
            self.held[REDUCE] += unit.reduced
        self.see(event.now, "copy to where it is reduced")
        unit.awaited.remove(event.name)
        self.free_if_done(unit, event.now - self.itemsize * self.sizes[event.name])

    def use(self, unit: "_Unit", order: list["_Unit"], work: int) -> None:
        if unit.is_whole:
            return
        if not unit.is_coming:
            self.held[GATHER] += unit.whole
        self.held[GATHER] += unit.whole
        self.see(work, "copy out of what was gathered")
        self.held[GATHER] -= unit.whole
        unit.is_whole, unit.is_coming = True, False
        place = order.index(unit) + 1
        for other in order[place : place + self.prefetch]:
            if not other.is_whole and not other.is_coming:
                other.is_coming = True
                self.held[GATHER] += other.whole

    def free(self, unit: "_Unit") -> None:
        self.held[GATHER] -= unit.whole * (unit.is_whole + unit.is_coming)
        unit.is_whole = unit.is_coming = False

    def free_if_done(self, unit: "_Unit", work: int) -> None:
        if not unit.is_done:
            return
        self.free(unit)
        while self.to_issue and self.to_issue[0].is_done:
            if len(self.under_way) == UNDER_WAY:
                self.collect(work)
            self.under_way.append(self.to_issue.popleft())
            self.held[REDUCE] += self.under_way[-1].reduced // self.ranks  # what comes back
            self.see(work, "reduce_scatter")

    def collect(self, work: int) -> None:
        unit = self.under_way.popleft()
        unit.has_buffer = False
        self.see(work, "wait for a reduce_scatter", unit.reduced * self.tuning.copies)
        self.held[REDUCE] -= unit.reduced + unit.reduced // self.ranks
        if self.first:  # it is kept, as the shard of gradients
            self.held[GRADIENTS] += unit.reduced // self.ranks

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
        self.update(shards)


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
