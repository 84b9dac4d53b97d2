"""The flat space of ZeRO-1 and 2: all trained parameters end to end, cut for N ranks.

These stages do not care where a tensor ends. They lay the P elements of all trained parameters end
to end, in one buffer of which each parameter is a view, and pad them, in thought, to N·S, where
S = ceil(P/N). That says which rank owns which element, and what travels together. For N = 3:

    parameters | head           | norm | down_proj         | up_proj     | ... | embedding   |0|
    buckets    |        0        |        1        |        2        | ... |        k        |
    pieces     |  0  |  1  |  2  |  0  |  1  |  2  |  0  |  1  |  2  | ... |  0  |  1  |  2  |

A *bucket* is what one collective moves. Its length is a multiple of N, and rank r is the *owner* of
the r-th of its N equal *pieces*. A rank's *shard* is its pieces of all buckets, side by side. Every
bucket is cut without a rest, so padding is needed at the very end alone, and a shard has S elements
however many buckets there are. Borders may fall within a parameter.

Parameters lie in the reverse of the module's order, about that in which backward completes their
gradients: bucket 0 is complete first. Groups of parameters follow one another, so that each is one
stretch of every shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from course_lib.comm.buckets import flat_piece
from course_lib.errors import CourseError
from course_lib.sharded.groups import common_dtype
from course_lib.specs.padding import flat_shard


@dataclass(frozen=True, eq=False)
class Part:
    """What a parameter and a stretch of the flat space have in common."""

    parameter: nn.Parameter
    within: slice  # of the parameter's elements
    place: slice  # of the stretch

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part [elements] of the parameter, of its gradient, or of what else has its shape."""
        return tensor.detach().reshape(-1)[self.within]


@dataclass(frozen=True, eq=False)
class Bucket:
    """What one collective moves: `size` elements, of which `in_shard` is a rank's piece."""

    size: int
    start: int  # in the flat space
    in_shard: slice
    parts: tuple[Part, ...]

    @property
    def filled(self) -> int:
        """How many elements it has, without padding."""
        return self.parts[-1].place.stop if self.parts else 0


class Flat:
    """The flat space of some groups of parameters, as one rank sees it.

    `values` [P] are the parameters, which become views of it. `shard_size` is S, `buckets` are in
    order, and `stretches` says where each group lies in this rank's shard. A bucket holds at most
    `bucket_bytes` of parameters, but one element of each rank.

    Errors: CourseError where there is no parameter, where they differ in dtype, and where one is
    not contiguous.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        rank: int,
        world_size: int,
        bucket_bytes: int,
    ) -> None:
        self.parameters = [p for group in groups for p in reversed(group)]
        self.dtype = common_dtype(self.parameters)
        if not all(p.is_contiguous() for p in self.parameters):
            raise CourseError(
                "ZeRO was given a parameter that is not contiguous, and lays them all end to end: "
                "make it `parameter.data.contiguous()` first."
            )
        self.values = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        sizes = [p.numel() for p in self.parameters]
        for parameter, values in zip(self.parameters, self.values.split(sizes), strict=True):
            parameter.data = values.view_as(parameter)
        self.shard_size = flat_shard(sum(sizes), world_size)
        piece = flat_piece(bucket_bytes, self.dtype.itemsize, world_size)

        self.buckets: list[Bucket] = []
        self._pieces: list[range] = []  # of this rank, in the flat space
        for start in range(0, self.shard_size, piece):
            stop = min(start + piece, self.shard_size)
            bucket = range(world_size * start, world_size * stop)
            self._pieces.append(bucket[rank * (stop - start) :][: stop - start])
            parts = self._parts(bucket)
            self.buckets.append(Bucket(len(bucket), bucket.start, slice(start, stop), parts))

        ends = accumulate(sum(p.numel() for p in group) for group in groups)
        cuts = [sum(len(own[: max(end - own.start, 0)]) for own in self._pieces) for end in ends]
        cuts[-1] = self.shard_size  # padding goes with the last group
        self.stretches = [slice(a, b) for a, b in pairwise([0, *cuts])]

    def shard(self) -> torch.Tensor:
        """A copy of this rank's shard of the parameters [S], zeros for padding."""
        shard = self.values.new_zeros(self.shard_size)
        for bucket, piece in zip(self.buckets, self._pieces, strict=True):
            own = self.values[piece.start : piece.stop]
            shard[bucket.in_shard][: own.numel()] = own
        return shard

    def check(self, model: nn.Module) -> None:
        """Errors: CourseError where `model` has other parameters by now, or these elsewhere."""
        here = self.values.untyped_storage().data_ptr()
        moved = [p for p in self.parameters if p.untyped_storage().data_ptr() != here and p.numel()]
        if moved or not set(self.parameters) <= set(model.parameters()):
            raise CourseError(
                "The model's parameters were replaced after ZeRO was made, which would train the "
                "old ones: cast the model, load it with assign=True, or move it before, and copy "
                "into parameters after."
            )

    def layout(self) -> dict:
        """What must agree for one rank's shard to be another's: plain data."""
        stretches = [(each.start, each.stop) for each in self.stretches]
        return {"bucket": self.buckets[0].size, "groups": stretches}

    def _parts(self, stretch: range) -> tuple[Part, ...]:
        parts, start = [], 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            a, b = max(start, stretch.start), min(stop, stretch.stop)
            if a < b:
                place = slice(a - stretch.start, b - stretch.start)
                parts.append(Part(parameter, slice(a - start, b - start), place))
            start = stop
        return tuple(parts)
