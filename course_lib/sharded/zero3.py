"""ZeRO-3 (Rajbhandari et al. 2020): every rank keeps 1/N of the parameters, too.

Who holds what. Everything exists once: of parameters, gradients and optimizer states, and of the
fp32 masters of 16-bit parameters, rank r has its shard. Parameters are whole only where and when
they are used, unit by unit: a *unit* is a block, or a module beside the blocks (see `unit`, which
cuts, gathers and frees it).

Who sends what, when. At the start rank 0 broadcasts its parameters and buffers. Then, in each
micro-batch:

1. Forward comes to a unit. An all_gather of its shards makes it whole, and while it computes, the
   next `prefetch` units are gathered. After its last use in forward it is freed.
2. Backward comes to the outputs of a unit. It is gathered again, and the next ones, in the reverse
   order.
3. A gradient that is complete is copied to where it is to be reduced, divided by N, and freed at
   once. When a unit has all, and no use of it is left, it is freed for the second time.
4. The unit's gradients then leave by a reduce_scatter, when its turn comes, which runs while
   backward goes on; two are under way at most. Parameters without a gradient have zeros there. At
   the end of backward what is left leaves. What comes back, this rank's piece of the mean, is added
   to its shard of the gradients.

A step sends the norm's all_reduce, one number, and nothing else: a rank updates its own shard, and
the next forward gathers what is new. Which units come next is known from the last forward, and on
all ranks the same; so every rank must use the same units in the same order.

What more is sharded? The parameters, the last thing that all ranks held alike.
Why does it save? A rank computes in one unit at a time. In place of P elements it keeps P/N, and
the units that are whole or on their way, prefetch + 1 of them.
Why does it cost? Parameters are gathered for forward and, as they were freed, again for backward:
2P, and a reduce_scatter makes 3P. Each micro-batch does all of that, so G of them move 3GP, where
ZeRO-2 moves (G + 1)P. And compute waits for a unit that is late.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_lib.comm.buckets import UNDER_WAY
from course_lib.errors import CourseError
from course_lib.sharded.gathering import NOT_AWAITED, Gathering
from course_lib.sharded.groups import common_dtype, optimizer_states, trained_groups
from course_lib.sharded.norm import clip, global_norm
from course_lib.sharded.unit import Unit, partition
from course_lib.specs.checking import whole


class ZeRO3:
    """Trains `model`, of which each rank keeps 1/N, by an optimizer and on gradients of that.

    Used as `ZeRO2` is: backward must be that of this class, `loss.backward()` raises a CourseError.
    Between steps the model's parameters are empty tensors; inside `gathered()` they are whole.

    `units` are modules whose parameters are gathered together, by default each block of a
    ModuleList. Every module outside of them with parameters of its own is a unit, too, and modules
    that share a parameter are one. Where a unit is called more than once in a forward, it is whole
    from the first call to the last. Outside of its unit's forward a parameter is empty: where it is
    used there, choose a larger unit, [model] at the extreme. What a unit's forward takes and gives
    are tensors, alone or in tuples, lists and dicts; nothing else writes to them in place.

    Of a unit with frozen parameters all are gathered, and the gradients of the others reduced.
    Every rank must call the same units in the same order, but may leave parameters in them unused:
    they count as having a gradient of zero. Where activations are checkpointed in stretches of
    several units, recomputing them gathers a third time.

    `groups`, `reduce_dtype`, `max_norm` and `options` are those of ZeRO1. The optimizer sees one
    flat shard for each trained tensor.

    Errors: CourseError where groups are not the trained parameters, each once, where parameters
    differ in dtype, and for a unit that is not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        units: Sequence[nn.Module] | None = None,
        groups: Iterable[dict] | None = None,
        prefetch: int = 1,
        reduce_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        **options,
    ) -> None:
        whole("prefetch", prefetch, least=0)
        groups = trained_groups(model, groups)
        low = common_dtype(model.parameters()).itemsize < 4
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        self.units = [Unit(*of, reduce_dtype) for of in partition(model, units)]
        self.max_norm = max_norm

        trained = [unit.shard[: sum(unit.trained_sizes)] for unit in self.units]
        self.masters = [shard.float() for shard in trained] if low else None
        self.updated: dict[nn.Parameter, nn.Parameter] = {}  # of each, this rank's shard
        for unit, values in zip(self.units, self.masters or trained, strict=True):
            pieces = map(nn.Parameter, values.split(unit.trained_sizes))
            self.updated.update(zip(unit.trained, pieces, strict=True))
        groups = [{**g, "params": [self.updated[p] for p in g["params"]]} for g in groups]
        self.optimizer = optimizer_class(groups, **options)

        self.gathering = Gathering(model, self.units, prefetch, self._issue_done)
        for unit in self.units:
            for parameter in unit.trained:
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, unit))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the mean over ranks of a micro-batch's gradients to the shards of gradients."""
        for unit in self.units:
            unit.await_reduction()
        self.under_way: deque[Unit] = deque()
        with self.gathering.backward():
            self.to_issue = deque(self._reverse_order())
            loss.backward()
        while self.to_issue:
            self._issue()
        while self.under_way:
            self.under_way.popleft().collect()

    def _reverse_order(self) -> list[Unit]:
        """Trained units as backward completes them: what forward came to first, it does last."""
        used = self.gathering.forward_order[::-1]
        return [unit for unit in dict.fromkeys([*used, *self.units]) if unit.trained]

    @torch.no_grad()
    def _on_gradient(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Backward has completed this rank's gradient of `parameter`."""
        if parameter not in unit.awaited:
            raise CourseError(NOT_AWAITED)
        unit.put_gradient(parameter)
        self.gathering.free_if_done(unit)

    def _issue_done(self) -> None:
        while self.to_issue and self.to_issue[0].is_done:
            self._issue()

    def _issue(self) -> None:
        """Start the reduce_scatter of the unit whose turn it is."""
        if len(self.under_way) == UNDER_WAY:
            self.under_way.popleft().collect()
        unit = self.to_issue.popleft()
        unit.reduce()
        self.under_way.append(unit)

    def step(self) -> float:
        """Update this rank's shard. The gradients' global norm, before it was clipped.

        Where that is inf or nan, so is a gradient on some rank, and nothing has been updated.
        """
        self._begin_write()
        gradients = [unit.mean_gradients() for unit in self.units]
        norm = global_norm(*gradients)
        if norm < float("inf"):  # nan is not
            clip(gradients, norm, self.max_norm)
            self._update(gradients)
        return norm

    def _begin_write(self) -> None:
        """No parameter is to be whole, or on its way, with the values from before."""
        if self.gathering.keeps_whole:
            raise CourseError(
                "ZeRO-3 was to write to its shards inside gathered(), where the model keeps the "
                "values from before: step, and load, outside of it."
            )
        self.gathering.free(*self.units)

    def _update(self, gradients: list[torch.Tensor]) -> None:
        for unit, gradient in zip(self.units, gradients, strict=True):
            pieces = gradient.split(unit.trained_sizes)
            for parameter, piece in zip(unit.trained, pieces, strict=True):
                updated = self.updated[parameter]
                updated.grad = piece.to(updated.dtype)
        self.optimizer.step()
        for updated in self.updated.values():
            updated.grad = None
        for unit, master in zip(self.units, self.masters or [], strict=bool(self.masters)):
            unit.shard[: master.numel()] = master

    def zero_grad(self) -> None:
        for unit in self.units:
            unit.gradients = None

    def gathered(self) -> contextlib.AbstractContextManager:
        """In there the model's parameters are whole, to be read: what is written to them is lost.

        with zero.gathered():
            state = copy.deepcopy(model.state_dict())
        """
        return self.gathering.whole()

    def state_dict(self) -> dict:
        """What this rank alone holds. Each rank saves its own, and the model's buffers beside it.

        The model's own state dict is whole inside of `gathered()`; copy it before you leave.
        """
        return {
            "layout": self._layout(),
            "shards": [unit.shard for unit in self.units],
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take up what the same rank saved. Errors: CourseError for that of another layout."""
        saved, own = state["layout"], self._layout()
        if saved != own:
            raise CourseError(
                f"The state is that of {saved}, and was expected to be that of {own}: load what "
                "this rank saved, among as many ranks, with the same units and groups."
            )
        self._begin_write()
        self.optimizer.load_state_dict(state["optimizer"])
        own = [*(unit.shard for unit in self.units), *(self.masters or [])]
        for tensor, values in zip(own, [*state["shards"], *(state["masters"] or [])], strict=True):
            tensor.copy_(values)

    def _layout(self) -> dict:
        """What must agree for one rank's shards to be another's: plain data."""
        index = {p: i for i, p in enumerate(self.updated.values())}
        groups = [[index[p] for p in group["params"]] for group in self.optimizer.param_groups]
        return {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "units": [unit.sizes for unit in self.units],
            "groups": groups,
        }

    def parameter_tensors(self) -> list[torch.Tensor]:
        """Every parameter that this rank holds: its shards."""
        return [unit.shard for unit in self.units]

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Every gradient that this rank holds: those of its shards."""
        return [unit.gradients for unit in self.units if unit.gradients is not None]

    def state_tensors(self) -> list[torch.Tensor]:
        """Every tensor that the optimizer holds on this rank: masters, states, step counters."""
        return [*(self.masters or []), *optimizer_states(self.optimizer)]
