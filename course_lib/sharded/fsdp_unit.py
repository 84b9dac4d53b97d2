"""A unit of FSDP: its states, and what moves it from one to the next.

    sharded ──gather──> gathering ──unshard──> whole ──reshard──> sharded, or
                                                              └──> resharded, to a smaller group

A rank's shards of all parameters of the unit lie side by side in one buffer [S], those of trained
ones first: one all_gather moves all of them. What comes, [N, S], is copied out, parameter by
parameter. *Resharded* is what comes after forward where `reshard_after_forward` is a number n of
ranks: of each parameter a rank keeps 1/n, not 1/N, and the gather for backward goes among n ranks,
which are near each other.

Gradients go the other way. When backward is through with the unit, they are copied, divided by all
ranks, into a buffer [N, S]; the parameters are freed; and a reduce_scatter gives each rank its
rows' mean. Where there are replicas, an all_reduce among those that have the same rows follows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from course_lib.errors import CourseError
from course_lib.sharded.fsdp_events import Event, Nothing
from course_lib.sharded.fsdp_groups import Groups
from course_lib.sharded.fsdp_parameter import Place, ShardedParameter

SHARDED, GATHERING, WHOLE, RESHARDED = "sharded", "gathering", "whole", "resharded"


@dataclass(frozen=True)
class MixedPrecision:
    """In which dtype parameters are gathered and computed with, gradients are reduced, and the
    model gives its output. None: as parameters are (`reduce`: as they are computed with).

    Shards, gradients of shards and so the optimizer's states stay in the parameters' own dtype.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None


class FSDPUnit:
    """One rank's part in the unit of `module`, called `name` in the model.

    Parameters on the meta device are made on `device`, and `init(module)` is called for each module
    that has some of them. Then all ranks take their rows of rank 0's values.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Mapping[nn.Parameter, Sequence[Place]],
        groups: Groups,
        reshards: bool,
        precision: MixedPrecision,
        offload: bool,
        device: torch.device,
        init: Callable[[nn.Module], None],
    ) -> None:
        self.name, self.module, self.groups, self.device = name, module, groups, device
        self.reshards, self.offload = reshards, offload
        self.events = Nothing()
        dtypes = {p.dtype for p in parameters}
        if len(dtypes) > 1:
            given = ", ".join(sorted(map(str, dtypes)))
            raise CourseError(
                f"The unit {name!r} has parameters of {given}, which travel together: cast them to "
                "one dtype, or make units of each."
            )
        dtype = dtypes.pop() if dtypes else torch.float32
        self.dtype = precision.param or dtype  # of what is whole
        self.reduce_dtype = precision.reduce or self.dtype
        self.rank, self.ranks = dist.get_rank(groups.shard), dist.get_world_size(groups.shard)
        replicas = dist.get_world_size(groups.replicas) if groups.replicas else 1
        self.factor = 1 / (self.ranks * replicas)

        every = sorted(parameters, key=lambda p: not p.requires_grad)  # trained first
        self.parameters = [ShardedParameter(p, parameters[p], self.rank, self.ranks) for p in every]
        self.trained = [p for p in self.parameters if p.trained]
        self.sizes = [p.size for p in self.parameters]
        self.trained_sizes = [p.size for p in self.trained]
        home = torch.device("cpu") if offload else device
        self.shards = torch.zeros(sum(self.sizes), dtype=dtype, device=home)  # [S]
        for p, shard in zip(self.parameters, self.shards.split(self.sizes), strict=True):
            p.lay_out(shard, self.dtype, device)

        self.state = SHARDED
        self.gathered: torch.Tensor | None = None  # [N, S]
        self.near: torch.Tensor | None = None  # [S·N/n] where resharded
        self.to_reduce: torch.Tensor | None = None  # [N, S of the trained]
        self.reduced: torch.Tensor | None = None  # [S of the trained]
        self.work: dist.Work | None = None  # of the all_gather
        self.reducing: dist.Work | None = None
        self.arriving: Event | None = None  # the all_gather, as it is recorded
        self.leaving: Event | None = None  # the reduction
        self.computing: Event | None = None
        self.in_backward = False
        self._cut(every, init)

    @torch.no_grad()
    def _cut(self, originals: list[nn.Parameter], init: Callable) -> None:
        made = {}
        for p, original in zip(self.parameters, originals, strict=True):
            if original.is_meta:
                p.show(nn.Parameter(torch.empty_like(original, device=self.device)))
                made |= dict.fromkeys(module for module, _ in p.places)
        for module in made:
            init(module)
        for p in self.parameters:
            module, name = p.places[0]
            values = module._parameters[name].detach().to(self.device)
            dist.broadcast(values, 0)
            p.shard.copy_(values[p.rows])
            p.free()
            p.show(p.shard)

    def check(self) -> None:
        """Errors: CourseError where the model has come to have other parameters than shards."""
        for p in self.parameters:
            for module, name in p.places:
                shown = module._parameters.get(name)
                if not (shown is p.shard or shown is p.whole) or not p.is_in(self.shards):
                    raise CourseError(
                        f"The parameter {name!r} of the unit {self.name!r} has been replaced, and "
                        "FSDP would go on with the one from before: change the model (its dtype, "
                        "its device, a tie) before FSDP is made."
                    )
                if shown.requires_grad != p.trained:
                    raise CourseError(
                        f"The parameter {name!r} of the unit {self.name!r} had requires_grad "
                        f"{p.trained} when FSDP was made, and now the other: freeze, and unfreeze, "
                        "before FSDP is made."
                    )

    @property
    def held(self) -> int:
        """Bytes beyond shards: what is whole, or resharded, and buffers."""
        buffers = (self.gathered, self.near, self.to_reduce, self.reduced)
        whole = [p.space for p in self.parameters] if self.state == WHOLE else []
        aside = [p.aside for p in self.trained]
        return sum(x.nbytes for x in [*buffers, *whole, *aside] if x is not None)

    def begins(self, what: str) -> None:
        """Its 'forward' or 'backward' begins."""
        self.computing = self.events.begin(what, self)

    def ends(self) -> None:
        if self.computing is not None:
            self.events.end(self.computing, self)
            self.computing = None

    # Parameters.

    def gather(self) -> None:
        """Start the all_gather, unless it is under way, or done."""
        if self.state in (GATHERING, WHOLE) or not self.parameters:
            return
        own, group = self.near, self.groups.near
        if own is None:
            own, group = self._to_device(self.shards).to(self.dtype), self.groups.shard
        with record_function("gather_buffers"):
            self.gathered = own.new_empty(dist.get_world_size(group), own.numel())
        self.work = dist.all_gather_single(self.gathered.view(-1), own, group, async_op=True)
        self.state = GATHERING
        self.arriving = self.events.follow("all_gather", self, self.gathered.nbytes, self.work)

    def unshard(self) -> None:
        """Have the parameters whole, and let the module see them so."""
        if self.state == WHOLE or not self.parameters:
            return
        self.gather()
        with self.events.span("wait", self):
            self.work.wait()
        self.events.is_done(self.arriving)
        with self.events.span("copy out", self, self.gathered.nbytes):
            ranks = len(self.gathered)
            for p in self.parameters:
                p.allocate()
            spaces = [p.space.view(ranks, -1) for p in self.parameters]
            sizes = [space.shape[1] for space in spaces]
            torch.split_with_sizes_copy(self.gathered, sizes, dim=1, out=spaces)
            self.gathered = self.work = self.near = None
            self.state = WHOLE
        for p in self.parameters:
            p.show(p.whole)

    def reshard(self, to_near: bool = False) -> None:
        """Free what is whole, or on its way; `to_near` keeps 1/n of what is whole."""
        if self.state == SHARDED or (self.state == RESHARDED and to_near):
            return
        before, self.near = self.held, None
        if self.state == GATHERING:
            self.work.wait()
            self.events.is_done(self.arriving)
            self.gathered = self.work = None
        elif self.state == WHOLE:
            if to_near:
                rank, ranks = dist.get_rank(self.groups.near), dist.get_world_size(self.groups.near)
                with record_function("gather_buffers"):
                    self.near = torch.cat([p.space.view(ranks, -1)[rank] for p in self.parameters])
            for p in self.parameters:
                p.free()
                p.show(p.shard)
        self.state = SHARDED if self.near is None else RESHARDED
        self.events.moment("reshard", self, before - self.held)

    def _to_device(self, shards: torch.Tensor) -> torch.Tensor:
        if not self.offload:
            return shards
        with self.events.span("to device", self, shards.nbytes):
            return shards.to(self.device, copy=True)

    # Gradients.

    @property
    def has_gradients(self) -> bool:
        """Are there whole gradients, which have not been reduced?"""
        return any(p.whole.grad is not None or p.aside is not None for p in self.trained)

    def reduce(self) -> None:
        """Start the reduce_scatter of the gradients that backward has left."""
        with record_function("reduce_buffers"):
            self.to_reduce = self._space_for_gradients(self.ranks)
            self.reduced = self._space_for_gradients()
        with self.events.span("copy in", self, self.to_reduce.nbytes):
            places = self.to_reduce.split(self.trained_sizes, dim=1)
            for p, place in zip(self.trained, places, strict=True):
                p.put_gradient(place, self.factor)
        self.reducing = dist.reduce_scatter_single(
            self.reduced, self.to_reduce.view(-1), group=self.groups.shard, async_op=True
        )
        nbytes = self.to_reduce.nbytes
        self.leaving = self.events.follow("reduce_scatter", self, nbytes, self.reducing)

    def collect(self) -> None:
        """Wait for the mean gradients of this rank's rows, and add them to the shards'."""
        self._wait_for_reduction()
        before, self.to_reduce = self.held, None
        if self.groups.replicas:
            self.reducing = dist.all_reduce(self.reduced, group=self.groups.replicas, async_op=True)
            nbytes = self.reduced.nbytes
            self.leaving = self.events.follow("all_reduce", self, nbytes, self.reducing)
            self._wait_for_reduction()
        reduced, self.reduced = self.reduced.to(self.shards.dtype), None
        if self.offload:
            with self.events.span("to host", self, reduced.nbytes):
                reduced = reduced.to("cpu", copy=True)
        for p, piece in zip(self.trained, reduced.split(self.trained_sizes), strict=True):
            p.add_to_shard(piece)
        self.events.moment("free", self, before - self.held)

    def put_aside(self) -> None:
        """Keep the whole gradients for later."""
        for p in self.trained:
            p.put_aside(self.reduce_dtype)

    def _wait_for_reduction(self) -> None:
        with self.events.span("wait", self):
            self.reducing.wait()
        self.events.is_done(self.leaving)
        self.reducing = None

    def abandon(self) -> None:
        """Forget the gradients of a backward that broke off."""
        if self.reducing is not None:
            self.reducing.wait()
        self.to_reduce = self.reduced = self.reducing = self.computing = None
        self.in_backward = False
        for p in self.trained:
            p.take_gradient()

    def _space_for_gradients(self, *ranks: int) -> torch.Tensor:
        shape = (*ranks, sum(self.trained_sizes))
        return torch.empty(shape, dtype=self.reduce_dtype, device=self.device)


def reset_parameters(module: nn.Module) -> None:
    """What fills a module that comes from the meta device, where nothing else is given."""
    if not hasattr(module, "reset_parameters"):
        raise CourseError(
            f"FSDP is to fill a {type(module).__name__} from the meta device, which has no "
            "reset_parameters(): give an init(module) that fills each module."
        )
    module.reset_parameters()


def make_buffers(model: nn.Module, device: torch.device, init: Callable) -> None:
    """Those on the meta device. What has parameters, too, is filled with these."""
    for module in model.modules():
        found = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
        for name, buffer in found.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if found and not module._parameters:
            init(module)
