"""What PyTorch's fully_shard does and when, told as our FSDP tells it: see `sharded.fsdp_events`.

    with recording_fully_shard(model) as events:  # begun before forward
        model.loss(tokens).backward()

PyTorch keeps a *state* for each module that was sharded, which has hooks around its forward and
backward, and in it a *parameter group*, which gathers, frees and reduces. While we record, methods
of both are wrapped, as are the objects that issue a group's collectives; then they are as before.

On the CPU a collective of fully_shard is waited for at once, so each comes with a `wait` of the
same length: nothing is hidden. On a GPU these would be the times of the host's calls.

A `free` is noted where PyTorch lets go of a buffer at an event of another unit. It keeps what was
gathered until the next unit of forward has its own, and the gradients that were reduced until the
next unit of backward comes to reduce: on a GPU something may read them until then.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from course_lib.errors import CourseError
from course_lib.sharded.fsdp_events import Event, Events
from course_lib.sharded.fsdp_unit import GATHERING, RESHARDED, SHARDED, WHOLE

VERSION = "2.13"
STATE = ("_pre_backward", "_root_post_backward_final_callback", "_fsdp_param_groups")
GROUP = (
    "unshard",
    "wait_for_unshard",
    "post_forward",
    "reshard",
    "post_backward",
    "finalize_backward",
    "is_unsharded",
    "is_sharded_post_forward",
    "fsdp_params",
    *("_all_gather_comm", "_all_gather_result", "_reduce_scatter_comm", "_training_state"),
)


@contextlib.contextmanager
def recording_fully_shard(model: nn.Module) -> Iterator[Events]:
    """In here every event of `model` is noted, on which fully_shard was called.

    Errors: CourseError where it was not, and where PyTorch is not as it was in 2.13.
    """
    if not isinstance(model, FSDPModule):
        raise CourseError(
            f"recording_fully_shard was given a {type(model).__name__} that is not sharded: call "
            "fully_shard on its blocks, and then on itself."
        )
    events = _Events()
    with contextlib.ExitStack() as undo:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                _watch_state(module._get_fsdp_state(), name, module, events, undo)
        undo.enter_context(_watching_all_reduce(events))
        yield events
        events.note_freed()


class _Unit:
    """A parameter group, as `Events` wants to see a unit: its name, its state, the bytes held."""

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.group = name, group
        self.buffers: list[weakref.ref[torch.Tensor]] = []  # gathered, or to be reduced, or reduced
        self.computing: Event | None = None
        self.gathering: dist.Work | None = None  # where it is not waited for at once
        self.noted = 0  # bytes held, as last recorded

    @property
    def state(self) -> str:
        if self.group._all_gather_result is not None:
            return GATHERING
        if self.group.is_unsharded:
            return WHOLE
        return RESHARDED if self.group.is_sharded_post_forward else SHARDED

    @property
    def held(self) -> int:
        self.buffers = [ref for ref in self.buffers if ref() is not None]
        kept = [ref() for ref in self.buffers]
        for p in self.group.fsdp_params:
            if self.state == WHOLE:
                kept += p.all_gather_outputs
                continue
            whole = getattr(p, "_unsharded_param", None)  # none before the first gather
            kept += [p.unsharded_accumulated_grad, None if whole is None else whole.grad]
            kept.append(getattr(p, "_sharded_post_forward_param_data", None))
        return sum(x.nbytes for x in kept if x is not None)


class _Events(Events):
    """Events, and what units lose meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[_Unit] = []
        self.reducing: _Unit | None = None

    def begin(self, kind: str, unit: _Unit, nbytes: int = 0) -> Event:
        self.note_freed(but=unit)
        return super().begin(kind, unit, nbytes)

    def end(self, event: Event, unit: _Unit | None = None) -> None:
        if unit is not None:
            self.note_freed(but=unit)
        super().end(event, unit)

    def note_freed(self, but: _Unit | None = None) -> None:
        for unit in self.units:
            if unit is not but and (freed := unit.noted - unit.held) > 0:
                event = super().begin("free", unit, freed)
                event.end = event.start

    def _settle(self, event: Event, unit: _Unit) -> None:
        super()._settle(event, unit)
        unit.noted = event.held


class _Collective:
    """Issues a group's collective through `comm`, as fully_shard would, and notes it.

    `allocate` is called for each buffer. A reduce_scatter has two, what it takes and what it gives,
    and between the two gradients are copied in; what it has given is a buffer no more.
    """

    def __init__(self, kind: str, comm: Any, unit: _Unit, events: _Events) -> None:
        self.kind, self.comm, self.unit, self.events = kind, comm, unit, events
        self.copying: Event | None = None

    def allocate(self, *args, **kwargs) -> torch.Tensor:
        if self.copying is not None:
            self.events.end(self.copying, self.unit)
        buffer = self.comm.allocate(*args, **kwargs)
        self.unit.buffers.append(weakref.ref(buffer))
        if self.kind == "reduce_scatter" and self.copying is None:
            self.copying = self.events.begin("copy in", self.unit, buffer.nbytes)
        return buffer

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args, **kwargs):
        self.copying = None
        nbytes = max(output_tensor.nbytes, input_tensor.nbytes)

        def issue():
            result = self.comm(output_tensor, input_tensor, *args, **kwargs)
            if self.kind == "reduce_scatter":
                del self.unit.buffers[-1]
            return result

        if not kwargs.get("async_op"):
            return _waited_for(self.kind, self.unit, nbytes, issue, self.events)
        event = self.events.begin(self.kind, self.unit, nbytes)
        self.unit.gathering = issue()
        done = self.unit.gathering.get_future().add_done_callback
        done(lambda _: self.events.end(event))
        return self.unit.gathering


def _waited_for(kind: str, unit: _Unit, nbytes: int, issue: Callable, events: _Events) -> Any:
    """Note a collective, and that compute stands still until it is done."""
    event = events.begin(kind, unit, nbytes)
    with events.span("wait", unit):
        result = issue()
    events.end(event)
    return result


def _watch_state(
    state: Any, name: str, module: nn.Module, events: _Events, undo: contextlib.ExitStack
) -> None:
    _check(state, STATE)
    units = []
    for group in state._fsdp_param_groups:
        _check(group, GROUP)
        units.append(_Unit(name, group))
        _watch_group(units[-1], events, undo)
    events.units += units

    def before_forward(*_) -> None:  # after fully_shard's own hook, and what that prefetches
        for unit in units:
            if unit.group._training_state.name == "FORWARD":
                _begin("forward", unit, events)

    def pre_backward(original: Callable, grad: torch.Tensor) -> torch.Tensor:
        grad = original(grad)
        for unit in units:
            if unit.computing is None or unit.computing.kind != "backward":
                _begin("backward", unit, events)
        return grad

    def final_callback(original: Callable) -> None:
        original()
        events.note_freed()

    undo.callback(module.register_forward_pre_hook(before_forward).remove)
    _wrap(state, "_pre_backward", pre_backward, undo)
    _wrap(state, "_root_post_backward_final_callback", final_callback, undo)


def _watch_group(unit: _Unit, events: _Events, undo: contextlib.ExitStack) -> None:
    group = unit.group

    def unshard(original: Callable, *args, **kwargs) -> None:
        before = len(events)
        original(*args, **kwargs)
        for event in events[before:]:  # only now does the group say that it is gathering
            if event.unit == unit.name:
                events._settle(event, unit)

    def wait_for_unshard(original: Callable) -> None:
        if group._all_gather_result is None:
            return
        if unit.gathering is not None:
            with events.span("wait", unit):
                unit.gathering.wait()
            unit.gathering = None
        nbytes = group._all_gather_result.all_gather_output.nbytes
        with events.span("copy out", unit, nbytes):
            original()

    def post_forward(original: Callable, *args) -> Any:
        _end(unit, events)
        return original(*args)

    def may_free(original: Callable, *args) -> None:
        was, held = unit.state, unit.held
        original(*args)
        if was in (GATHERING, WHOLE) and unit.state in (SHARDED, RESHARDED):
            events.moment("reshard", unit, held - unit.held)

    def post_backward(original: Callable, *args) -> None:
        _end(unit, events)
        events.reducing = unit
        original(*args)
        events.reducing = None

    for wrapper in (unshard, wait_for_unshard, post_forward, post_backward):
        _wrap(group, wrapper.__name__, wrapper, undo)
    _wrap(group, "reshard", may_free, undo)
    _wrap(group, "finalize_backward", may_free, undo)
    for kind in ("all_gather", "reduce_scatter"):
        comm = getattr(group, f"_{kind}_comm")
        setattr(group, f"_{kind}_comm", _Collective(kind, comm, unit, events))
        undo.callback(setattr, group, f"_{kind}_comm", comm)


@contextlib.contextmanager
def _watching_all_reduce(events: _Events) -> Iterator[None]:
    """Hybrid sharding calls dist.all_reduce while a unit's gradients are reduced."""
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args, **kwargs) -> Any:
        issue = partial(original, tensor, *args, **kwargs)
        if events.reducing is None:  # the caller's own
            return issue()
        return _waited_for("all_reduce", events.reducing, tensor.nbytes, issue, events)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original


def _begin(kind: str, unit: _Unit, events: _Events) -> None:
    _end(unit, events)  # a checkpoint may stop what it recomputes halfway
    unit.computing = events.begin(kind, unit)


def _end(unit: _Unit, events: _Events) -> None:
    if unit.computing is not None:
        events.end(unit.computing, unit)
        unit.computing = None


def _wrap(owner: Any, name: str, wrapper: Callable, undo: contextlib.ExitStack) -> None:
    """On this one object `name` is `wrapper(original, ...)` until `undo`."""
    setattr(owner, name, partial(wrapper, getattr(owner, name)))
    undo.callback(delattr, owner, name)


def _check(owner: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise CourseError(
            f"PyTorch {torch.__version__} has no {type(owner).__name__}.{missing[0]}, by which "
            f"recording_fully_shard notes events: it knows PyTorch {VERSION}, so install that."
        )
