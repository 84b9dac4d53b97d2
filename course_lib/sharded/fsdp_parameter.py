"""One parameter under FSDP2: cut by rows, and in turn sharded and whole.

Rank r of N has the r-th ceil(D/N) rows of a parameter whose first dimension is D, as torch.chunk
cuts them: the last rank that has rows may have fewer, and ranks after it none. D = 18 on 8 ranks
gives six shards of 3 rows, and two that are empty. A collective moves as much from each rank, so
what travels is padded to ceil(D/N) rows.

The module shows one of two nn.Parameters in turn. `shard` is there between steps: what an optimizer
updates, and what has the reduced gradient. `whole` is there while the module computes. It is always
the same tensor in the same storage, as autograd saves it in forward and must find it again in
backward. So to free it, its storage is resized to 0 bytes; and it is written through `space`, a
tensor of its own for that storage, as autograd takes what was saved for spoilt if it sees a write.

FSDP1 cuts a *flat parameter* instead: all parameters of a unit end to end, with one padding at the
end. That spares padding and copies. But a shard ends within a row, all of a unit must be alike in
dtype, and neither an optimizer nor a checkpoint sees the model's own tensors.
"""

from collections.abc import Sequence

import torch
from torch import nn

from course_lib.errors import CourseError
from course_lib.specs.padding import flat_shard

Place = tuple[nn.Module, str]  # who has a parameter, and under which name


class ShardedParameter:
    """A parameter [D, ...] of which this rank, the `rank`-th of `ranks`, has its rows.

    `size` is the elements of a shard with padding. Errors: CourseError where there is no dimension.
    """

    def __init__(
        self, original: nn.Parameter, places: Sequence[Place], rank: int, ranks: int
    ) -> None:
        if original.dim() == 0:
            raise CourseError(
                f"FSDP cuts parameters by rows, and {places[0][1]!r} has no dimension: give it the "
                "shape [1]."
            )
        self.places, self.shape, self.trained = places, original.shape, original.requires_grad
        self.numel, self.row = original.numel(), original.shape[1:].numel()
        rows, each = original.shape[0], flat_shard(original.shape[0], ranks)
        self.rows = slice(min(rank * each, rows), min((rank + 1) * each, rows))
        self.ranks, self.size = ranks, each * self.row
        self.aside: torch.Tensor | None = None  # a whole gradient, see put_aside

    def lay_out(self, shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        """From now on `shard` [size] has this rank's rows, and `whole` is of `dtype`."""
        self.shard = nn.Parameter(self.rows_of(shard), requires_grad=self.trained)
        self.space = torch.empty(self.ranks, self.size, dtype=dtype, device=device)
        self.view = self.space.view(-1)[: self.numel].view(self.shape)
        self.whole = nn.Parameter(self.space.new_empty(0), requires_grad=self.trained)
        self.whole.data = self.view

    def rows_of(self, padded: torch.Tensor) -> torch.Tensor:
        """Of [size] elements those of this rank's rows, which may be none: [rows, ...]."""
        rows = self.rows.stop - self.rows.start
        return padded[: rows * self.row].view(rows, *self.shape[1:])

    def is_in(self, shards: torch.Tensor) -> bool:
        """Is the shard still where it was laid out?"""
        return self.shard.untyped_storage().data_ptr() == shards.untyped_storage().data_ptr()

    def show(self, parameter: nn.Parameter) -> None:
        """Let the modules have `shard`, or `whole`."""
        for module, name in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter
            else:  # an LSTM has a list of them besides
                setattr(module, name, parameter)

    def allocate(self) -> None:
        self.space.untyped_storage().resize_(self.space.nbytes)

    def free(self) -> None:
        self.space.untyped_storage().resize_(0)

    def take_gradient(self) -> torch.Tensor | None:
        """The whole gradient, of all backwards since it was taken, and the only one to hold it."""
        aside, self.aside = self.aside, None
        new, self.whole.grad = self.whole.grad, None
        return new if aside is None else aside if new is None else aside.add_(new)

    def put_aside(self, dtype: torch.dtype) -> None:
        """Keep the whole gradient, as `dtype`, until it is taken."""
        gradient = self.take_gradient()
        self.aside = None if gradient is None else gradient.to(dtype)

    def put_gradient(self, into: torch.Tensor, factor: float) -> None:
        """Into [N, size], rank by rank, the whole gradient times `factor`, zeros without one."""
        gradient = self.take_gradient()
        if gradient is None:
            into[:] = 0
            return
        flat = gradient.reshape(-1).to(into.dtype)
        full = self.numel // (self.size or 1)  # ranks that have as many rows as any
        torch.mul(flat[: full * self.size].view(full, -1), factor, out=into[:full])
        if full < self.ranks:
            rest = flat[full * self.size :]
            into[full:] = 0
            into[full, : rest.numel()] = rest * factor

    def add_to_shard(self, reduced: torch.Tensor) -> None:
        """Add to the shard's gradient what was reduced: [size]."""
        rows = self.rows_of(reduced)
        if self.shard.grad is None:
            self.shard.grad = rows
        else:
            self.shard.grad += rows
