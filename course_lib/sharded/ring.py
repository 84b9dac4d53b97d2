"""Ring collectives (Patarasuk and Yuan 2009), on nothing but send and recv.

N ranks stand in a ring. In one step each rank sends a chunk to its right neighbour, rank + 1, and
receives one from its left neighbour, rank - 1; no rank ever talks to another one. After N - 1
steps something that travels has been on every rank:

    reduce_scatter   A partial sum travels, and each rank adds its own part to it. The sum of
                     chunk c starts on rank c + 1 and comes home, complete, to rank c.
    all_gather       A chunk travels, and each rank keeps a copy. Chunk c starts on rank c.
    all_reduce       Both, one after the other: first every chunk is summed, then all get all.

So in step s of a reduce_scatter, 1 to N - 1, what rank r receives is the sum of chunk r - 1 - s;
in step s of an all_gather it is chunk r - s. Both are counted modulo N.
"""

import torch
import torch.distributed as dist


def exchange(tensor: torch.Tensor) -> torch.Tensor:
    """Send `tensor` to the right neighbour; return what the left one sent, of the same shape.

    The send must not block: if every rank waited for its right neighbour to receive, none would
    ever come to receive.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    sending.wait()
    return incoming


def reduce_scatter(chunks: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, each rank keeping one chunk of the result, its own.

    chunks: [N, chunk], contiguous, this rank's part of each chunk. Returns [chunk]: the sum over
    ranks of chunks[rank].
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    partial = chunks[(rank - 1) % world_size].clone()  # [chunk]
    for step in range(1, world_size):
        partial = exchange(partial) + chunks[(rank - 1 - step) % world_size]
    return partial


def all_gather(mine: torch.Tensor) -> torch.Tensor:
    """Give every rank the chunks of all ranks: mine [chunk] on each, [N, chunk] in rank order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = mine.new_empty(world_size, *mine.shape)  # [N, chunk]
    chunks[rank] = travelling = mine.contiguous()
    for step in range(1, world_size):
        chunks[(rank - step) % world_size] = travelling = exchange(travelling)
    return chunks


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, on every rank: a new tensor of the same shape.

    N need not divide its E elements: the last chunks of ceil(E/N) are padded with zeros.
    """
    world_size = dist.get_world_size()
    chunk = -(-tensor.numel() // world_size)
    padded = tensor.new_zeros(world_size, chunk)  # [N, chunk]
    padded.view(-1)[: tensor.numel()] = tensor.flatten()
    total = all_gather(reduce_scatter(padded))  # [N, chunk]
    return total.view(-1)[: tensor.numel()].view_as(tensor)
