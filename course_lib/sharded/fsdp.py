"""FSDP2, fully sharded data parallelism as PyTorch's fully_shard has it (Zhao et al. 2023).

Who holds what. As under ZeRO-3 everything exists once: of parameters, gradients and optimizer
states rank r has its rows of each tensor (see `fsdp_parameter`). Parameters are whole only where
and when they are used, unit by unit (see `fsdp_unit`, and `wrapping` for the choice of units).

Who sends what, when. A unit's *life cycle*, in each micro-batch:

1. Before its forward an all_gather of shards makes its parameters whole. The next
   `forward_prefetch` units, as the last forward used them, are sent for before this one computes.
2. After its forward they are freed, if `reshard_after_forward`.
3. Backward comes to its outputs: they are gathered again, and the next `backward_prefetch` units,
   in the reverse order of forward, are sent for.
4. Backward has the gradients of its inputs: those of its parameters are complete. They are freed,
   and a reduce_scatter of gradients begins, after the one before has been waited for.
5. At the end of backward units are brought to an end that backward did not pass through, and the
   last reduce_scatter is waited for.

A parameter that got no gradient counts as one with zeros where others of its unit got some, as it
may have got one on another rank. A unit to which backward did not lead, on any rank, has none.

The *root unit* has what no other unit has. It is not freed after forward, as backward begins there.

What is it that ZeRO-3 is not? The same ledger, 16P/N and 3P. But it is the model's own tensors that
are cut, so that an optimizer, a clip, a checkpoint see shards under the names that they know; it is
`loss.backward()` that runs; and each unit has its own life cycle, which can be tuned.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_lib.sharded import wrapping
from course_lib.sharded.fsdp_autograd import cast, in_backward, tensors, watched
from course_lib.sharded.fsdp_events import Events, Nothing
from course_lib.sharded.fsdp_groups import groups
from course_lib.sharded.fsdp_unit import (
    GATHERING,
    FSDPUnit,
    MixedPrecision,
    make_buffers,
    reset_parameters,
)
from course_lib.sharded.norm import clip, global_norm
from course_lib.specs.checking import whole


class FSDP:
    """Shards `model`, in place.

        fsdp = FSDP(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after: it sees shards
        model.loss(tokens).backward()
        fsdp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    `units` are modules (see `wrapping`), by default every block; each must be called, on all ranks
    in the same order. `mesh` has the ranks among which to shard, by default all; with two
    dimensions, replicas and shards, it is *hybrid* sharding. `reshard_after_forward` may be a
    number n of ranks: after forward a rank keeps the 1/n that it and its neighbours share.
    `gathers` is how many units may be on their way at once. With `offload` shards, their gradients
    and so the optimizer's states are on the CPU. A model on the meta device is made unit by unit,
    and `init(module)` fills each module that has parameters: by default its reset_parameters().

    `recompute_reshards` is FSDP1's way with checkpointing outside of units: recomputing one is a
    forward like another, and frees it. Backward then gathers it a third time.

    Errors: CourseError for units that share a parameter or are not the model's, parameters without
    a dimension, and shapes of ranks that do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int = True,
        forward_prefetch: int = 1,
        backward_prefetch: int = 1,
        gathers: int = 2,
        precision: MixedPrecision = MixedPrecision(),  # noqa: B008 (frozen)
        offload: bool = False,
        init: Callable[[nn.Module], None] = reset_parameters,
        device: torch.device | str = "cpu",
        recompute_reshards: bool = False,
    ) -> None:
        whole("forward_prefetch", forward_prefetch, least=0)
        whole("backward_prefetch", backward_prefetch, least=0)
        whole("gathers", gathers)
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.gathers = gathers
        self.model, self.precision, self.recompute_reshards = model, precision, recompute_reshards
        self.synchronizing = True
        self.groups = groups(mesh, reshard_after_forward)
        device = torch.device(device)
        make_buffers(model, device, init)
        names = {module: name for name, module in model.named_modules()}
        chosen = wrapping.blocks(model) if units is None else units
        self.units = [
            FSDPUnit(
                names[module],
                module,
                parameters,
                self.groups,
                reshards=bool(reshard_after_forward) and module is not model,
                precision=precision,
                offload=offload,
                device=device,
                init=init,
            )
            for module, parameters in wrapping.assign(model, chosen).items()
        ]
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        self.forward_order: list[FSDPUnit] = []  # of the last forward
        self.left: list[FSDPUnit] = []  # in this one
        self.under_way: deque[FSDPUnit] = deque()
        self.in_backward = False
        self.through: set[FSDPUnit] = set()  # of them, those that backward has left
        self.keeps_whole = False  # inside of gathered()
        for unit in self.units:
            before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(after)

    @property
    def root(self) -> FSDPUnit:
        return self.units[0]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In here backward reduces nothing: whole gradients add up on each rank, 1/N of which it
        will keep. Parameters are freed as ever."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    @contextlib.contextmanager
    def recording(self) -> Iterator[Events]:
        """In here every event is noted, see `fsdp_events`."""
        events = Events()
        for unit in self.units:
            unit.events = events
        try:
            yield events
        finally:
            for unit in self.units:
                unit.events = Nothing()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """In here the model's parameters are whole, to be read, in the dtype that they compute in.
        What is written to them is lost."""
        self._reshard(*self.units)  # shards may have changed since
        before, self.keeps_whole = self.keeps_whole, True
        try:
            for unit in self.units:
                unit.unshard()
            yield
        finally:
            self.keeps_whole = before
            self._reshard(*self.units)

    def _reshard(self, *units: FSDPUnit, to_near: bool = False) -> None:
        if not self.keeps_whole:
            for unit in units:
                unit.reshard(to_near)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients to a global norm of at most `max_norm`. Returns what it was.

        Replicas have the same rows: a norm over all ranks would be too large by the square root of
        their number.
        """
        shards = [p.shard for unit in self.units for p in unit.trained]
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        if not gradients:
            return 0.0
        norm = global_norm(*gradients, group=self.groups.shard)
        clip(gradients, norm, max_norm)
        return norm

    # Forward. Where activations are checkpointed, it runs again within backward.

    def _before_forward(self, unit: FSDPUnit, module: nn.Module, args: tuple, kwargs: dict):
        """Returns the inputs to go on with."""
        if self.in_backward and not in_backward():
            self._abandon()
        if unit is self.root and not in_backward():
            self._begin_forward()
        unit.unshard()
        args, kwargs = cast(args, self.precision.param), cast(kwargs, self.precision.param)
        if unit.in_backward:  # backward has come to its outputs, and recomputes what is inside
            return args, kwargs
        if not in_backward():
            self._send_for(self.forward_order, unit, self.forward_prefetch)
        unit.begins("forward")
        return watched(partial(self._after_backward, unit), args, kwargs)

    def _after_forward(self, unit: FSDPUnit, module: nn.Module, args: tuple, output):
        """Returns the output to go on with."""
        if not unit.in_backward:
            unit.ends()
            if not in_backward():
                self.left.append(unit)
            if unit.reshards and (self.recompute_reshards or not in_backward()):
                self._reshard(unit, to_near=self.groups.near is not None)
            for x in tensors(output):
                if x.requires_grad:
                    x.register_hook(partial(self._before_backward, unit))
                    if x._base is not None and x._base.grad_fn is not None:
                        x._base.grad_fn.register_prehook(partial(self._at_base, unit))
        if unit is not self.root:
            return output
        if not (torch.is_grad_enabled() or in_backward()):
            self._reshard(*self.units)  # an evaluation, which no backward follows
        return cast(output, self.precision.output)

    def _begin_forward(self) -> None:
        self.forward_order = list(dict.fromkeys(self.left))
        self.left = []
        for unit in self.units:
            unit.check()
        self._reshard(*self.units)  # where no backward came, or shards have changed since

    def _send_for(self, order: list[FSDPUnit], unit: FSDPUnit, count: int) -> None:
        """Gather those that come next in `order`, as many as may be on their way."""
        if unit in order:
            place = order.index(unit) + 1
            for other in order[place : place + count]:
                if sum(x.state == GATHERING for x in self.units) < self.gathers:
                    other.gather()

    # Backward.

    def _before_backward(self, unit: FSDPUnit, *gradients: torch.Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if self.root in self.left:
                self._before_backward(self.root)  # all is inside of it
        if not unit.in_backward:
            unit.in_backward = True
            unit.unshard()
            backward_order = list(dict.fromkeys(reversed(self.left)))
            self._send_for(backward_order, unit, self.backward_prefetch)
            unit.begins("backward")

    def _at_base(self, unit: FSDPUnit, *gradients: torch.Tensor) -> None:
        """An output is a view, and loses its hook if it is written to; its base does not."""
        if unit not in self.through:
            self._before_backward(unit)

    @torch.no_grad()
    def _after_backward(self, unit: FSDPUnit) -> None:
        """Backward is through with the unit: free it, and reduce its gradients."""
        unit.ends()
        unit.in_backward = False
        self._reshard(unit)
        if not self.synchronizing:
            unit.put_aside()
        elif unit.has_gradients:  # else another call follows, or none leads to them
            while self.under_way:
                self.under_way.popleft().collect()
            unit.reduce()
            self.under_way.append(unit)
        self.through.add(unit)

    def _end_backward(self) -> None:
        """End the units that backward did not pass through."""
        for unit in self.left:  # inner ones before those around them
            unit.ends()
        for unit in self.units:
            if unit.in_backward or unit.has_gradients:
                self._after_backward(unit)
        while self.under_way:
            self.under_way.popleft().collect()
        self._reshard(*self.units)  # also what was sent for, and not used
        self.through.clear()
        self.in_backward = False

    def _abandon(self) -> None:
        """A backward broke off: nothing of it is left, nor of gradients that were put aside."""
        for unit in self.units:
            unit.abandon()
        self._reshard(*self.units)
        self.under_way.clear()
        self.through.clear()
        self.in_backward = False
