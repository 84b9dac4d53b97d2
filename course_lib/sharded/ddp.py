"""Data parallelism (Li et al. 2020, "PyTorch Distributed"): every rank holds everything.

Each rank holds all parameters, gradients and optimizer states, and works on its own part of the
batch. The copies stay equal, since all ranks start alike and take the same steps:

1. At the start rank 0 broadcasts its parameters and buffers.
2. Gradients live in *buckets*: flat tensors, of which each parameter's `grad` is a view. Buckets
   are laid out in the order in which backward computes gradients. At first that is a guess, the
   reverse of the module's order; from the second backward on it is what rank 0 saw in the first.
3. During backward each gradient, once complete, is divided by the number of ranks into its place.
   When a bucket is full its all_reduce starts, and runs while backward goes on. All ranks must
   issue the same collectives in the same order, so a bucket that is full early waits its turn.
4. At the end of backward each rank waits for its all_reduces. Every `grad` is now the mean over
   the ranks, the same on each, and so is the optimizer's step.

Buffers, such as BatchNorm's running statistics, have no gradients and drift apart, so rank 0
broadcasts its own before each forward. Inside `no_sync` nothing travels: gradients add up in the
buckets, and the next backward outside of it sends the sums.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from course_lib.comm.buckets import BUCKET_BYTES, buckets, caps
from course_lib.errors import CourseError

BROADCAST_BYTES = 250 * 2**20  # what a broadcast copies into one message, as PyTorch does
BROKE_OFF = (
    "The last backward broke off, and its all_reduces may still write to the gradients: "
    "make DDP anew."
)


@dataclass(eq=False)  # a bucket equals itself alone
class Bucket:
    """The gradients of some parameters, side by side."""

    parameters: list[nn.Parameter]
    flat: torch.Tensor  # [elements of all its parameters]
    to_come: int = 0  # gradients that this backward has not completed yet
    work: dist.Work | None = None  # its all_reduce


class DDP(nn.Module):
    """Wraps the module of which each rank has a copy, and keeps the copies equal.

    A bucket is closed once it holds `bucket_bytes` (25 MiB) or more, the first one once it holds
    `first_bucket_bytes` (1 MiB, but `bucket_bytes` where only those are given). Tensors are never
    split, and each dtype has buckets of its own. Gradients take no memory but the buckets, which
    stay when `grad` is set to None.

    Errors: CourseError at the end of a backward that left a parameter without a gradient, since
    the other ranks wait for it. Reentrant checkpointing, a backward within backward, ends so too.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.caps = caps(bucket_bytes, first_bucket_bytes)
        self.group = process_group or dist.group.WORLD
        self.synchronizing = True  # not inside no_sync
        self.sends = True  # will the next backward synchronise? The forward before it decides
        self.trained = [p for p in module.parameters() if p.requires_grad]
        if not self.trained:
            raise CourseError(
                "DDP was given a module in which no parameter requires a gradient, and expects one "
                "to train: call the module itself."
            )
        self.arrived: list[nn.Parameter] = []  # whose gradients this backward has completed
        self.first_order: list[nn.Parameter] | None = None  # what the first backward completed
        self._broadcast([*module.parameters(), *module.buffers()])
        self._lay_out(self.trained[::-1])
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *args, **kwargs):
        """What the module makes of this rank's part of the batch."""
        if self.arrived:
            raise CourseError(BROKE_OFF)
        if torch.is_grad_enabled():
            self.sends = self.synchronizing
        if self.synchronizing:
            self._broadcast(list(self.module.buffers()))
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A forward in here, and its backward, add to this rank's gradients and send nothing."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Backward has completed this rank's gradient of `parameter`."""
        if not self.sends:
            _, place = self.places[parameter]
            parameter.grad = place.copy_(parameter.grad)  # nothing to do where it is there already
            return
        if not self.arrived:
            self._on_first_gradient()
        bucket, place = self.places[parameter]
        if not bucket.to_come:
            raise CourseError(BROKE_OFF)
        # Divided before the sum, not after it: in fp16 the sum might overflow.
        parameter.grad = torch.mul(parameter.grad, 1 / self.group.size(), out=place)
        self.arrived.append(parameter)
        bucket.to_come -= 1
        while self.to_issue and not self.to_issue[0].to_come:
            full = self.to_issue.pop(0)
            full.work = dist.all_reduce(full.flat, group=self.group, async_op=True)

    def _on_first_gradient(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._on_end_of_backward)
        if self.first_order:
            self._lay_out(self._as_on_rank_0(self.first_order))
            self.first_order = []  # used
        for bucket in self.buckets:
            bucket.to_come = len(bucket.parameters)
        self.to_issue = list(self.buckets)

    def _on_end_of_backward(self) -> None:
        missing = set(self.trained) - set(self.arrived)
        if missing:
            names = [name for name, p in self.module.named_parameters() if p in missing]
            raise CourseError(
                f"Backward gave no gradient to {', '.join(names)}, and each rank must have one of "
                "every parameter: use them all in the loss, or freeze those before DDP is made."
            )
        for bucket in self.buckets:
            bucket.work.wait()
        if self.first_order is None:
            self.first_order = self.arrived
        self.arrived = []

    def _as_on_rank_0(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The trained parameters in rank 0's order: all ranks need the same buckets."""
        index = {parameter: i for i, parameter in enumerate(self.trained)}
        order = torch.tensor([index[p] for p in parameters], device=parameters[0].device)
        dist.broadcast(order, group_src=0, group=self.group)
        return [self.trained[i] for i in order.tolist()]

    def _lay_out(self, parameters: list[nn.Parameter]) -> None:
        """Make buckets for gradients that come in this order."""
        self.buckets: list[Bucket] = []
        self.places: dict[nn.Parameter, tuple[Bucket, torch.Tensor]] = {}
        for group in _grouped(parameters, *self.caps):
            bucket = Bucket(group, group[0].new_empty(sum(p.numel() for p in group)))
            self.buckets.append(bucket)
            for parameter, part in zip(group, _parts(bucket.flat, group), strict=True):
                self.places[parameter] = bucket, part

    @torch.no_grad()
    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0."""
        for group in _grouped(tensors, BROADCAST_BYTES):
            flat = torch.cat([tensor.flatten() for tensor in group])
            dist.broadcast(flat, group_src=0, group=self.group)
            for tensor, part in zip(group, _parts(flat, group), strict=True):
                tensor.copy_(part)


def _grouped(tensors: list[torch.Tensor], *caps: int | None) -> list[list[torch.Tensor]]:
    """Put tensors of one dtype together, up to the caps; the group that is full first is first."""
    groups = []
    for dtype in {tensor.dtype for tensor in tensors}:
        alike = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        made = buckets([tensors[i].nbytes for i in alike], *caps)
        groups += [[alike[i] for i in bucket] for bucket in made]
    return [[tensors[i] for i in group] for group in sorted(groups, key=lambda group: group[-1])]


def _parts(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` [elements of all tensors], each of the shape of one of them."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
