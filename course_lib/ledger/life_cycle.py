"""What FSDP's units hold as they come and go: the life cycle of sharded.fsdp, in bytes alone.

Whoever has the events of a micro-batch plays them here: a unit's forward begins and ends, backward
comes to it, completes a gradient, is through with it. `held` then has what the rank holds beyond
its shards of parameters and of the optimizer's states, by kind:

    gather     parameters that are whole, or on their way; what is kept of them after forward
    gradients  whole gradients, from when backward completes them until they are to be reduced
    reduce     what is being reduced, and what comes of it
    shards     gradients of shards, as they come

Moments within an event at which more is held than after it are told by `see(what)`: parameters are
copied out of the buffer that was gathered; gradients into the one that is reduced.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

GATHER, GRADIENTS, REDUCE, SHARDS = "gather", "gradients", "reduce", "shards"
SHARDED, GATHERING, WHOLE = "sharded", "gathering", "whole"


@dataclass(eq=False)
class Life:
    """A unit: bytes that do not change, and where it stands.

    `whole` are its parameters, [N, S]; `sent` a rank's shards of them where they are a copy, cast
    or from the host; `near` what is kept after forward. `to_reduce` are gradients, [N, S of the
    trained]; `piece` what comes of them, and `shard` that as it is kept.
    """

    name: str
    root: bool
    reshards: bool
    whole: int = 0
    sent: int = 0
    near: int = 0
    to_reduce: int = 0
    piece: int = 0
    shard: int = 0
    state: str = SHARDED
    is_near: bool = False  # is `near` there?
    from_near: bool = False  # what is on its way
    in_backward: bool = False
    has_shard: bool = False  # of gradients
    new: dict[str, int] = field(default_factory=dict)  # gradients of this backward
    aside: dict[str, int] = field(default_factory=dict)  # of those before, not reduced


class LifeCycle:
    """The units of one rank. `see(what)` is called where most is held.

    `widen` is by what a gradient grows where it is cast to be reduced, 1 where it is not cast;
    `moves`: what comes of it is cast, or moved to the host. `copies`: a reduce_scatter copies what
    it is given, and holds that until it is waited for, as gloo's does.
    """

    def __init__(
        self,
        units: Iterable[Life],
        see: Callable[[str], None],
        *,
        forward_prefetch: int = 1,
        backward_prefetch: int = 1,
        gathers: int = 2,
        recompute_reshards: bool = False,
        widen: float = 1,
        moves: bool = False,
        copies: bool = False,
    ) -> None:
        self.units, self.see = list(units), see
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.gathers, self.recompute_reshards = gathers, recompute_reshards
        self.widen, self.moves, self.copies = widen, moves, copies
        self.held: Counter[str] = Counter()
        self.in_flight = 0  # units that are being gathered
        self.synchronizing = True
        self.running_backward = False
        self.forward_order: list[Life] = []
        self.left: list[Life] = []  # units, as forward leaves them
        self.through: set[Life] = set()
        self.under_way: deque[Life] = deque()

    @property
    def total(self) -> int:
        return sum(self.held.values())

    # Forward.

    def before_forward(self, unit: Life) -> None:
        if unit.in_backward:
            return
        if unit.root and not self.running_backward:
            self.forward_order = list(dict.fromkeys(self.left))
            self.left = []
            for other in self.units:
                self._reshard(other)
        self._unshard(unit)
        if not self.running_backward:
            self._send_for(self.forward_order, unit, self.forward_prefetch)

    def after_forward(self, unit: Life) -> None:
        if unit.in_backward:
            return
        if not self.running_backward:
            self.left.append(unit)
        if unit.reshards and (self.recompute_reshards or not self.running_backward):
            self._reshard(unit, to_near=unit.near > 0)

    def _send_for(self, order: list[Life], unit: Life, count: int) -> None:
        if unit in order:
            place = order.index(unit) + 1
            for other in order[place : place + count]:
                if self.in_flight < self.gathers:
                    self._gather(other)

    # Backward.

    def before_backward(self, unit: Life) -> None:
        self.running_backward = True
        if not unit.in_backward:
            unit.in_backward = True
            self._unshard(unit)
            order = list(dict.fromkeys(reversed(self.left)))
            self._send_for(order, unit, self.backward_prefetch)

    def gradient(self, unit: Life, name: str, nbytes: int) -> None:
        """Backward has completed the gradient of the parameter `name`."""
        unit.new[name] = nbytes
        self.held[GRADIENTS] += nbytes

    def after_backward(self, unit: Life) -> None:
        unit.in_backward = False
        self._reshard(unit)
        if not self.synchronizing:
            self._put_aside(unit)
        elif unit.to_reduce:
            self._collect_all()
            self._reduce(unit)
            self.under_way.append(unit)
        self.through.add(unit)

    def end_backward(self) -> None:
        for unit in dict.fromkeys([*reversed(self.left), *self.units]):
            if unit.in_backward or (unit in self.left and unit not in self.through):
                self.after_backward(unit)
        self._collect_all()
        for unit in self.units:
            self._reshard(unit)
        self.through.clear()
        self.running_backward = False

    # Parameters.

    def _gather(self, unit: Life) -> None:
        if unit.state == SHARDED and unit.whole:
            unit.from_near = unit.is_near
            self.held[GATHER] += unit.whole + (0 if unit.from_near else unit.sent)
            unit.state = GATHERING
            self.in_flight += 1

    def _unshard(self, unit: Life) -> None:
        if unit.state == WHOLE or not unit.whole:
            return
        self._gather(unit)
        self.held[GATHER] += unit.whole
        self.see("copy out of what was gathered")
        self.held[GATHER] -= unit.whole + (unit.near if unit.from_near else unit.sent)
        unit.state, unit.is_near = WHOLE, False
        self.in_flight -= 1

    def _reshard(self, unit: Life, to_near: bool = False) -> None:
        if unit.state == SHARDED and to_near:
            return
        if unit.is_near:
            unit.is_near = False
            self.held[GATHER] -= unit.near
        if unit.state == GATHERING:
            self.in_flight -= 1
            self.held[GATHER] -= unit.whole + (0 if unit.from_near else unit.sent)
        elif unit.state == WHOLE:
            if to_near:
                unit.is_near = True
                self.held[GATHER] += unit.near
                self.see("keep a part of what was gathered")
            self.held[GATHER] -= unit.whole
        unit.state = SHARDED

    # Gradients.

    def _put_aside(self, unit: Life) -> None:
        """Keep what is new, in the dtype in which it will be reduced."""
        for name, nbytes in unit.new.items():
            if name not in unit.aside:
                unit.aside[name] = cast = int(self.widen * nbytes)
                self.held[GRADIENTS] += cast
                if self.widen != 1:
                    self.see("cast a gradient")
            self.held[GRADIENTS] -= nbytes
        unit.new.clear()

    def _reduce(self, unit: Life) -> None:
        self.held[REDUCE] += unit.to_reduce + unit.piece
        self.see("copy to where it is reduced")
        for name in [*unit.aside, *(x for x in unit.new if x not in unit.aside)]:
            aside, new = unit.aside.get(name, 0), unit.new.get(name, 0)
            if not aside and self.widen != 1:
                self.held[GRADIENTS] += int(self.widen * new)
                self.see("cast a gradient")
                self.held[GRADIENTS] -= int(self.widen * new)
            self.held[GRADIENTS] -= aside + new
        unit.new.clear()
        unit.aside.clear()

    def _collect_all(self) -> None:
        while self.under_way:
            self._collect(self.under_way.popleft())

    def _collect(self, unit: Life) -> None:
        if self.copies:
            self.held[REDUCE] += unit.to_reduce
        self.see("wait for a reduce_scatter")
        self.held[REDUCE] -= unit.to_reduce * (2 if self.copies else 1)
        self.held[SHARDS] += unit.shard
        if self.moves:
            self.see("cast or move the gradients of shards")
        self.held[REDUCE] -= unit.piece
        if unit.has_shard:
            self.held[SHARDS] -= unit.shard  # added to what was there
        unit.has_shard = True
