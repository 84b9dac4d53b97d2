"""When the units of ZeRO-3 are whole, and which are gathered ahead.

In forward a module's hooks say when a unit is used: it is gathered before, and freed after its last
call. In backward hooks on tensors say so. Backward *reaches* a call when it has the gradient of one
of its outputs; the unit is gathered then. It is *through* with the call when it has those of its
inputs, as far as they come from this call. A unit is *done*, and freed, when backward has reached
all of its calls, is through with them, and has all the gradients of its parameters that it will
have: no path that is left leads through the unit. What cannot be told so is freed at the end.

Which unit comes next is guessed: in forward what came next the last time, in backward the reverse
of forward. A wrong guess costs a gather, and what was gathered in vain is freed.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from course_lib.errors import CourseError
from course_lib.sharded.unit import Unit

NOT_AWAITED = (
    "Backward came to what ZeRO-3 did not await: call the backward(loss) of ZeRO3, and complete "
    "each gradient once in it."
)


class Call:
    """One call of a unit in forward, and what backward has seen of it.

    `on_reached(call)` is called for each output that has a gradient, `on_through(call)` once.
    """

    def __init__(self, unit: Unit, on_reached: Callable, on_through: Callable) -> None:
        self.unit, self.on_reached, self.on_through = unit, on_reached, on_through
        self.aliases: list[torch.Tensor] = []  # of inputs, while the call runs
        self.to_come = 0  # inputs whose gradients backward has not completed yet
        self.reached = False

    def watched(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Aliases of the inputs, to go on with. The gradient of one is this call's part alone."""
        args = tuple([_over_tensors(self._alias, x) for x in args])
        return args, {name: _over_tensors(self._alias, x) for name, x in kwargs.items()}

    def ends(self, output) -> bool:
        """The call has made `output`. Can backward reach it?"""
        passed_on, self.aliases = {id(alias) for alias in self.aliases}, []
        tensors = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
        made = [x for x in tensors if isinstance(x, torch.Tensor) and id(x) not in passed_on]
        made = [x for x in made if x.grad_fn is not None]
        for x in made:
            x.register_hook(self._reach)
        return bool(made)

    def _alias(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            return x
        alias = x.view_as(x)
        alias.register_hook(self._come)
        self.aliases.append(alias)
        self.to_come += 1
        return alias

    def _reach(self, gradient: torch.Tensor) -> None:
        self.on_reached(self)
        self.reached = True

    def _come(self, gradient: torch.Tensor) -> None:
        self.to_come -= 1
        if not self.to_come:
            self.on_through(self)


def _over_tensors(function: Callable, value):
    """Tensors, alone or in tuples. Lists and dicts stay the caller's own: a unit may fill them."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is tuple:
        return tuple([_over_tensors(function, x) for x in value])
    return value


class Gathering:
    """Has each of `units` whole when it is used, and at most `prefetch` more on their way.

    `on_done()` is called when backward has freed a unit.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], prefetch: int, on_done: Callable
    ) -> None:
        self.units, self.prefetch, self.on_done = units, prefetch, on_done
        self.in_backward = False
        self.keeps_whole = False  # inside of whole()
        self.entered: list[Unit] = []  # in this forward, at each call
        self.left: list[Unit] = []
        self.forward_order: list[Unit] = []  # what is expected
        self.backward_order: list[Unit] = []
        for unit in units:
            for module in unit.modules:
                enter, leave = partial(self._enter, unit), partial(self._leave, unit)
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                module.register_forward_hook(leave, always_call=True)
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward, always_call=True)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """In here backward runs. Expect of it the reverse of the last forward, and of the next
        forward the same."""
        if self.left:
            self.forward_order = list(dict.fromkeys(self.entered))
            self.backward_order = list(dict.fromkeys(reversed(self.left)))
        for unit, uses in Counter(self.left).items():
            unit.uses = uses
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            self._forget_calls()
            self.free(*self.units)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In here no unit is freed."""
        before, self.keeps_whole = self.keeps_whole, True
        try:
            for unit in self.units:
                unit.unshard()
            yield
        finally:
            self.keeps_whole = before
            self.free(*self.units)

    def free(self, *units: Unit) -> None:
        if not self.keeps_whole:
            for unit in units:
                unit.free()

    def free_if_done(self, unit: Unit) -> None:
        if unit.is_done:
            self.free(unit)
            self.on_done()

    def _use(self, unit: Unit, order: list[Unit]) -> None:
        """Have `unit` whole, and on their way those that come next in `order`."""
        if unit.is_whole:
            return
        place = order.index(unit) + 1 if unit in order else len(order)
        coming = order[place : place + self.prefetch]
        for other in self.units:
            if other.gathering is not None and other is not unit and other not in coming:
                other.free()  # it was expected, and did not come
        unit.unshard()
        for other in coming:
            other.gather()

    # Forward. Where activations are checkpointed, it runs again within backward.

    def _begin_forward(self, model: nn.Module, args: tuple) -> None:
        if not self.in_backward:
            self._forget_calls()

    def _enter(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict):
        """A unit's forward begins. Returns the inputs to go on with, None for the same."""
        call = Call(unit, self._on_reached, self._on_through)
        unit.running.append(call)
        if self.in_backward:
            unit.unshard()
        else:
            self.entered.append(unit)
            self._use(unit, self.forward_order)
        return call.watched(args, kwargs) if torch.is_grad_enabled() else None

    def _leave(self, unit: Unit, module: nn.Module, args: tuple, output) -> None:
        """A unit's forward ends."""
        can_be_reached = unit.running.pop().ends(output)
        if self.in_backward:
            if not unit.reached:
                self.free(unit)
            return
        self.left.append(unit)
        unit.calls += 1
        unit.to_reach += can_be_reached
        if unit.calls >= unit.uses and not unit.running:
            self.free(unit)

    def _end_forward(self, model: nn.Module, args: tuple, output) -> None:
        if not self.in_backward:
            self.free(*self.units)  # also what was expected, and did not come

    def _forget_calls(self) -> None:
        self.entered, self.left = [], []
        for unit in self.units:
            unit.calls = unit.to_reach = unit.open = 0

    # Backward.

    def _on_reached(self, call: Call) -> None:
        if not self.in_backward:
            raise CourseError(NOT_AWAITED)
        unit = call.unit
        if not call.reached:
            unit.to_reach -= 1
            unit.open += call.to_come > 0
        self._use(unit, self.backward_order)
        if not unit.reached:
            unit.reached = True
            unit.await_gradients()

    def _on_through(self, call: Call) -> None:
        if call.reached:
            call.unit.open -= 1
            self.free_if_done(call.unit)
