"""What a rank of fsdp or hsdp holds, event by event. See `peak`, which replays them.

The rules are those of sharded.fsdp, which ledger.life_cycle has. Here units live through what a
micro-batch really did, with what it held besides.
"""

from course_lib.comm.units import ROOT, plain, units
from course_lib.ledger import life_cycle
from course_lib.ledger.buffers import itemsizes, lives
from course_lib.ledger.life_cycle import LifeCycle
from course_lib.ledger.replay import GATHER, REDUCE, Rank, raised
from course_lib.ledger.work import Event
from course_lib.specs.padding import row_shard
from course_lib.specs.recipe import GRADIENTS, OPTIMIZER_STATES

KINDS = {  # of a life cycle: categories
    life_cycle.GATHER: GATHER,
    life_cycle.GRADIENTS: REDUCE,
    life_cycle.REDUCE: REDUCE,
    life_cycle.SHARDS: GRADIENTS,
}


class Fsdp(Rank):
    def prepare(self, events, model, recipe, strategy, tuning) -> None:
        ranks, cut = strategy.shard_ranks, units(model, strategy, tuning.units)
        trained = [[x for x in unit.tensors if x.name in self.sizes] for unit in cut]
        self.shards = [row_shard(x, ranks) for x in model.tensors() if x.name in self.sizes]
        sums = [sum(row_shard(x, ranks) for x in tensors) for tensors in trained]
        own, self.width, reduced = itemsizes(recipe, tuning.reduce)  # width: of whole gradients
        offloads = strategy.offload == "all"
        self.life = LifeCycle(
            lives(cut, sums, recipe, strategy, tuning.reduce),
            lambda what: self.see(self.now, what),
            forward_prefetch=tuning.ahead[0],
            backward_prefetch=tuning.ahead[1],
            gathers=tuning.gathers,
            recompute_reshards=tuning.recompute_reshards,
            widen=reduced / self.width,
            moves=offloads or reduced != own,
            copies=tuning.copies,
        )
        if tuning.keeps_last:
            self.life.units[-1].reshards = False
        blocks = [unit.whole for unit in self.life.units if unit.reshards]
        self.held[GATHER] += tuning.frees_late * max(blocks, default=0)
        self.no_sync, self.now = tuning.no_sync, 0
        self.updates = tuning.host or OPTIMIZER_STATES not in strategy.offloaded
        if tuning.host:
            lines = [x for x in self.states.lines if x.host and x.category != GRADIENTS]
            for line in lines:
                self.held[line.category] += line.bytes
        elif offloads:
            for unit in self.life.units:
                unit.shard = 0

        named = {unit.name: unit for unit in self.life.units}
        given = named if tuning.units is None else {ROOT, *tuning.units}
        self.of = {name: named[plain(name)] for name in given if plain(name) in named}
        self.owner = {x.name: named[unit.name] for unit in cut for x in unit.tensors}
        # As in the step before, which had the same order.
        left = [event.name for event in events if event.kind == "leave"]
        self.life.left = [self.of[name] for name in left if name in self.of]

    def begins(self, last: bool) -> None:
        self.life.synchronizing = last or not self.no_sync

    def see(self, work: int, at: str, besides: int = 0) -> None:
        raised(self.tops, self.life.held)
        super().see(work, at, besides)

    @property
    def all_held(self) -> int:
        return super().all_held + self.life.total

    def in_all(self) -> dict[str, int]:
        parts, held = dict(self.held), self.life.held
        for kind, category in KINDS.items():
            parts[category] = parts.get(category, 0) + held[kind]
        return parts

    def on(self, event: Event) -> None:
        self.now = event.now
        if event.kind == "end":
            self.life.end_backward()
        elif event.kind == "gradient":
            name = plain(event.name)
            self.now -= self.width * self.sizes[name]
            self.life.gradient(self.owner[name], name, self.width * self.sizes[name])
        elif event.name in self.of:
            unit = self.of[event.name]
            match event.kind:
                case "enter":
                    self.life.before_forward(unit)
                case "leave":
                    self.life.after_forward(unit)
                case "reach":
                    self.life.before_backward(unit)
                case "through" if unit.in_backward:
                    self.life.after_backward(unit)

    def step(self) -> None:
        if self.updates:
            self.update(self.shards)
