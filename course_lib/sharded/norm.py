"""The global gradient norm, over gradients of which each rank has shards.

The square of a norm is a sum over elements, so ranks need to tell each other one number each: the
squares of their own. What every rank computes from the total is the same, so all clip by the same
factor, and all pass over a step whose norm is inf or nan. Padding is zero, and adds nothing.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist


def global_norm(*shards: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """The 2-norm of all ranks' `shards` together, or those of a group's. Each element must be one
    rank's alone.

    In fp64, where the square of any finite gradient is finite.
    """
    norms = [torch.linalg.vector_norm(shard, dtype=torch.float64) for shard in shards]
    squares = torch.linalg.vector_norm(torch.stack(norms)).square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().item()


def clip(shards: Iterable[torch.Tensor], norm: float, max_norm: float | None) -> None:
    """Scale `shards`, whose global norm is `norm`, in place, to one of at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_ does, which adds 1e-6 to the norm.
    """
    if max_norm is not None and norm > max_norm:
        for shard in shards:
            shard *= max_norm / (norm + 1e-6)
