"""ZeRO-1 (Rajbhandari et al. 2020): every rank updates its own 1/N of the parameters.

Who holds what. All N ranks hold the parameters whole, and each the whole gradients of its own part
of the batch. The optimizer's states exist once: rank r has them for its shard of the flat space
(see `flat`), and so has the fp32 masters of 16-bit parameters.

Who sends what, when. At the start rank 0 broadcasts its parameters and buffers. Micro-batches send
nothing; their gradients add up in `grad`. Then, once a step:

1. Bucket by bucket, a reduce_scatter gives each rank the mean over ranks of its shard's gradients.
2. An all_reduce of one number adds up the squares of all shards: the square of the global norm.
   Where it is not finite, no rank updates anything. Otherwise gradients are clipped by it.
3. The optimizer updates the shard: the masters, or where there are none, a copy of that part of
   the parameters, which is freed after the step.
4. Bucket by bucket, an all_gather of updated shards gives all ranks all parameters.

What more is sharded? The optimizer's states; DDP has them N times over.
Why does it save? They are the most of it, 12 of 16 bytes per parameter where Adam keeps masters,
and only the update needs them, which goes element by element: an owner needs nobody else's.
Why does it cost? For P elements a reduce_scatter and an all_gather move P each, as much as the
all_reduce that they replace. But the all_gather can begin only after the update, when there is no
backward left to hide it; and a bucket of gradients to reduce from comes on top.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.errors import CourseError
from course_lib.sharded.flat import Bucket, Flat, Part
from course_lib.sharded.groups import optimizer_states, trained_groups
from course_lib.sharded.norm import clip, global_norm


class ZeRO1:
    """Trains `model` by an optimizer of which each rank has 1/N.

        zero = ZeRO1(model, torch.optim.AdamW, lr=1e-3)
        zero.backward(model.loss(tokens))
        zero.step()
        zero.zero_grad()

    `optimizer_class` must work element by element, as AdamW and SGD do: it is shown flat shards,
    one for each of `groups` (as torch's optimizers take them; all parameters where none are given).
    `optimizer` is the instance, for schedulers of the learning rate. Between steps its parameters
    are empty. 16-bit parameters have fp32 masters, of the parameters as they are now: the next step
    undoes what is loaded into the model later.

    Gradients are reduced as `reduce_dtype`, by default that of the parameters, and clipped to a
    global norm of `max_norm`, where given. A parameter without a gradient counts as one with a
    gradient of zero, as in PyTorch after zero_grad(set_to_none=False): weight decay and momentum
    still move it. (PyTorch's optimizers pass over one whose `grad` is None, but here the optimizer
    sees shards, not parameters, and other ranks may have a gradient.)

    Errors: CourseError where groups are not the trained parameters, each once; see also `Flat`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        groups: Iterable[dict] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        reduce_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        **options,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        groups = trained_groups(model, groups)
        self.model = model
        params = [group["params"] for group in groups]
        self.flat = Flat(params, self.rank, self.world_size, bucket_bytes)
        self.reduce_dtype = reduce_dtype or self.flat.dtype
        self.max_norm = max_norm

        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        low = self.flat.dtype.itemsize < 4
        self.masters = self.flat.shard().float() if low else None  # [S]
        dtype = torch.float32 if low else self.flat.dtype
        self.updated = [
            nn.Parameter(torch.empty(0, dtype=dtype, device=self.flat.values.device))
            for _ in groups
        ]
        groups = [{**g, "params": [p]} for g, p in zip(groups, self.updated, strict=True)]
        self.optimizer = optimizer_class(groups, **options)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this rank's micro-batch to `grad`. Divide `loss` by their number."""
        loss.backward()

    def step(self) -> float:
        """Update all parameters on all ranks. The gradients' global norm, before it was clipped.

        Where that is inf or nan, so is a gradient on some rank, and nothing has been updated.
        """
        self.flat.check(self.model)
        gradients = self._mean_gradients()  # [S]
        norm = global_norm(gradients)
        if norm < float("inf"):  # nan is not
            clip([gradients], norm, self.max_norm)
            self._all_gather(self._update(gradients))
        return norm

    def zero_grad(self) -> None:
        for parameter in self.flat.parameters:
            parameter.grad = None

    def state_dict(self) -> dict:
        """What this rank alone holds. Each rank saves its own, beside the model's state dict."""
        return {
            "layout": {"rank": self.rank, "world_size": self.world_size} | self.flat.layout(),
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take up what the same rank saved. Errors: CourseError for that of another layout."""
        saved, own = state["layout"], self.state_dict()["layout"]
        if saved != own:
            raise CourseError(
                f"The state is that of {saved}, and was expected to be that of {own}: load what "
                "this rank saved, among as many ranks, with the same groups and bucket_bytes."
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if self.masters is not None:
            self.masters.copy_(state["masters"])

    def state_tensors(self) -> list[torch.Tensor]:
        """Every tensor that the optimizer holds on this rank: masters, states, step counters."""
        masters = [] if self.masters is None else [self.masters]
        return [*self.updated, *masters, *optimizer_states(self.optimizer)]

    @torch.no_grad()
    def _mean_gradients(self) -> torch.Tensor:
        """The mean over ranks of this rank's shard of the gradients: [S]."""
        shard = self._zeros(self.flat.shard_size)
        for bucket in self.flat.buckets:
            self._reduce_scatter(bucket, shard[bucket.in_shard])
        return shard

    def _reduce_scatter(self, bucket: Bucket, piece: torch.Tensor) -> None:
        """Into `piece`, what is this rank's of the mean gradients of `bucket`."""
        whole = self._new(bucket)
        for part in bucket.parts:
            self._put_in(whole, part)
        dist.reduce_scatter_single(piece, whole)

    def _zeros(self, elements: int) -> torch.Tensor:
        return self.flat.values.new_zeros(elements, dtype=self.reduce_dtype)

    def _new(self, bucket: Bucket) -> torch.Tensor:
        """A buffer [bucket.size] for its gradients, zeros where it is padding."""
        with record_function("reduce_buffers"):
            whole = self.flat.values.new_empty(bucket.size, dtype=self.reduce_dtype)
        whole[bucket.filled :] = 0
        return whole

    def _put_in(self, whole: torch.Tensor, part: Part) -> None:
        """Into a bucket, a part of this rank's gradients, divided by N: the sum is the mean."""
        if part.parameter.grad is None:
            whole[part.place] = 0
        else:
            gradient = part.of(part.parameter.grad).to(whole.dtype)
            torch.mul(gradient, 1 / self.world_size, out=whole[part.place])

    def _update(self, gradients: torch.Tensor) -> torch.Tensor:
        """Let the optimizer update this rank's shard: the new values [S]."""
        with record_function("other"):
            values = self.flat.shard() if self.masters is None else self.masters
        for parameter, stretch in zip(self.updated, self.flat.stretches, strict=True):
            parameter.data = values[stretch]
            parameter.grad = gradients[stretch].to(values.dtype)
        self.optimizer.step()
        for parameter in self.updated:
            parameter.grad = None
            parameter.data = values.new_empty(0)
        return values

    @torch.no_grad()
    def _all_gather(self, shard: torch.Tensor) -> None:
        """Overwrite the parameters with what all ranks have as `shard` [S], each of its own."""
        for bucket in self.flat.buckets:
            piece = shard[bucket.in_shard].to(self.flat.dtype)
            whole = self.flat.values[bucket.start :][: bucket.size]
            if bucket.filled == bucket.size:
                dist.all_gather_single(whole, piece)
            else:  # the last bucket, whose padding has no place among the parameters
                with record_function("gather_buffers"):
                    padded = piece.new_empty(bucket.size)
                dist.all_gather_single(padded, piece)
                whole.copy_(padded[: bucket.filled])
