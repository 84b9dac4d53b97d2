"""ZeRO-2 (Rajbhandari et al. 2020): every rank keeps the gradients of its own 1/N alone.

Who holds what. All N ranks hold the parameters whole. The optimizer's states and, new here, the
gradients exist once: rank r has those of its shard of the flat space (see `flat`), and so has the
fp32 masters of 16-bit parameters. Other gradients only pass through, in a few buckets.

Who sends what, when. At the start rank 0 broadcasts its parameters and buffers. Then, in each
micro-batch's backward:

1. A gradient that is complete is copied into its buckets, divided by N, and freed at once.
2. A bucket that is complete, and whose turn it is, leaves by a reduce_scatter, which runs while
   backward goes on. Two are under way at most: before a third, the first is waited for and freed.
   The turns are the buckets' order at first, and after the first backward those in which rank 0
   completed them: nothing waits for a bucket in which some early tensor's gradient is missing.
3. What comes back, this rank's piece of the mean, is added to its shard of the gradients.
4. At the end of backward what is left leaves, with zeros for parameters that got no gradient. So
   all ranks issue the same collectives in the same order, whatever each has used.

A step is that of ZeRO-1 without its reduce_scatter: the norm's all_reduce, the update, all_gathers.

What more is sharded? The gradients, at rest and between micro-batches.
Why does it save? A rank updates its shard alone, so once the mean over ranks is there it needs
no others. In place of P elements a rank keeps P/N, and a few buckets while backward goes on.
Why does it cost? Not more per step than ZeRO-1, with one micro-batch: 2P. But a sum over
micro-batches needs somewhere to be: ZeRO-1 adds up whole gradients and reduces them once, ZeRO-2
reduces those of each micro-batch. G micro-batches move (G + 1)P.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from course_lib.comm.buckets import UNDER_WAY
from course_lib.errors import CourseError
from course_lib.sharded.flat import Bucket, Part
from course_lib.sharded.zero1 import ZeRO1


@dataclass(eq=False)
class Filling:
    """A bucket of gradients during one backward."""

    bucket: Bucket
    to_come: int  # parts that backward has not completed yet
    whole: torch.Tensor | None = None  # [bucket.size], from the first gradient on
    piece: torch.Tensor | None = None  # [bucket.size / N], from the reduce_scatter on
    work: dist.Work | None = None


class ZeRO2(ZeRO1):
    """Trains `model` by an optimizer and on gradients of which each rank has 1/N.

    Used as `ZeRO1` is, with the same options, but that backward must be that of this class:
    `loss.backward()` raises a CourseError, and so does one that completes a gradient twice, as with
    reentrant checkpointing. `gradients` [S] are the mean over ranks and the sum over micro-batches,
    in `reduce_dtype`; None after zero_grad. The model's own `grad` are None.
    """

    def __init__(self, model: nn.Module, optimizer_class, **options) -> None:
        super().__init__(model, optimizer_class, **options)
        self.gradients: torch.Tensor | None = None  # [S]
        self.turns: list[int] | None = None  # indices of buckets, once a backward has shown them
        self.awaited: dict[nn.Parameter, list[tuple[Filling, Part]]] = {}
        for parameter in self.flat.parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the mean over ranks of a micro-batch's gradients to `gradients`, shard by shard."""
        if self.gradients is None:
            self.gradients = self._zeros(self.flat.shard_size)
        self._await_gradients()
        loss.backward()
        for parameter in list(self.awaited):  # which had no part in this loss
            self._on_completed(parameter)
        while self.under_way:
            self._collect()
        if self.turns is None:
            self.turns = self._as_on_rank_0(map(self.flat.buckets.index, self.completed))

    def _await_gradients(self) -> None:
        """A backward begins, in which each gradient has its places in buckets."""
        fillings = [Filling(bucket, len(bucket.parts)) for bucket in self.flat.buckets]
        self.to_issue = deque(fillings if self.turns is None else [fillings[i] for i in self.turns])
        self.under_way: deque[Filling] = deque()
        self.completed: list[Bucket] = []
        self.awaited = {p: [] for p in self.flat.parameters}
        for filling in fillings:
            for part in filling.bucket.parts:
                self.awaited[part.parameter].append((filling, part))

    def zero_grad(self) -> None:
        super().zero_grad()
        self.gradients = None

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Every gradient that this rank holds: its shard's."""
        return [] if self.gradients is None else [self.gradients]

    def _mean_gradients(self) -> torch.Tensor:
        """What backward has left: [S]."""
        return self._zeros(self.flat.shard_size) if self.gradients is None else self.gradients

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Backward has completed this rank's gradient of `parameter`."""
        if parameter not in self.awaited:
            parameter.grad = None
            raise CourseError(
                "Backward completed a gradient that ZeRO-2 did not await, as it awaits each once: "
                "call the backward(loss) of ZeRO2, and checkpoint with use_reentrant=False."
            )
        self._on_completed(parameter)

    def _on_completed(self, parameter: nn.Parameter) -> None:
        for filling, part in self.awaited.pop(parameter):
            if filling.whole is None:
                filling.whole = self._new(filling.bucket)
            self._put_in(filling.whole, part)
            filling.to_come -= 1
            if not filling.to_come:
                self.completed.append(filling.bucket)
            while self.to_issue and not self.to_issue[0].to_come:
                self._issue()
        parameter.grad = None

    def _as_on_rank_0(self, order: Iterable[int]) -> list[int]:
        """Rank 0's order: all ranks must issue the same collectives."""
        shared = torch.tensor(list(order), device=self.flat.values.device)
        dist.broadcast(shared, 0)
        return shared.tolist()

    def _issue(self) -> None:
        """Start the reduce_scatter of the bucket whose turn it is."""
        if len(self.under_way) == UNDER_WAY:
            self._collect()
        filling = self.to_issue.popleft()
        with record_function("reduce_buffers"):
            filling.piece = filling.whole.new_empty(filling.bucket.size // self.world_size)
        filling.work = dist.reduce_scatter_single(filling.piece, filling.whole, async_op=True)
        self.under_way.append(filling)

    def _collect(self) -> None:
        """Wait for the reduce_scatter that was issued first."""
        filling = self.under_way.popleft()
        filling.work.wait()
        self.gradients[filling.bucket.in_shard] += filling.piece
        filling.whole = filling.piece = filling.work = None  # whoever still knows of it
