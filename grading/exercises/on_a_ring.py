"""Run an answer on ranks, and report how its numbers travelled: a ring is more than its result.

Below that, what the ring's exercises have in common: their cases, and ways to pass a tensor on.
"""

from collections import Counter
from random import Random

import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.checks.exercise import Answer, Case
from course_lib.checks.on_ranks import on_ranks


def on_a_ring(answer: Answer, case: Case) -> dict[str, object]:
    """As `checks.on_ranks`, but gives for each rank what it returned, what it called how often,
    how many bytes it sent, and to how many others.

    A request that was never waited for may still be on its way when the answer returns. What was
    returned is then a matter of luck, so that such requests are all that is reported.
    """
    return on_ranks(_reporting(answer), case)


def _reporting(answer: Answer) -> Answer:
    def on_this_rank(*args):
        returned = answer(*args)
        log = ranks.entries()
        pending = [e.kind for e in log if e.kind in ("send", "recv") and e.end is None]
        if pending:
            return {"never waited for": dict(Counter(pending))}
        sends = [e for e in log if e.kind == "send"]
        return {
            "returned": returned,
            "calls": dict(Counter(e.kind for e in log)),
            "bytes sent": sum(e.payload for e in sends),
            "sent to how many ranks": len({e.peer for e in sends}),
        }

    return on_this_rank


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def blocking(tensor):
    """Passes to the right, but all send before anyone receives."""
    rank, n = me()
    incoming = torch.empty_like(tensor)
    dist.send(tensor, (rank + 1) % n)
    dist.recv(incoming, (rank - 1) % n)
    return incoming


def to_the_left(tensor):
    rank, n = me()
    incoming = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank - 1) % n)
    dist.recv(incoming, (rank + 1) % n)
    sending.wait()
    return incoming


def in_one_batch(tensor):
    rank, n = me()
    incoming = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % n)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return incoming


def everyones(tensor):
    """[N, …]: the tensors of all ranks, by torch's own collective."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def summed(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def numbers(rng: Random, *shape: int):
    if not shape:
        return round(rng.uniform(-9, 9), 2)
    return [numbers(rng, *shape[1:]) for _ in range(shape[0])]


def ring_case(inputs: list) -> Case:
    """One rank for each input, which is all that it is given."""
    held = ", ".join(f"rank {rank} has {mine}" for rank, mine in enumerate(inputs))
    return Case(f"{len(inputs)} ranks", ([[mine] for mine in inputs],), given=held)


DEADLOCK = "A blocking send returns only when the other side receives, and nobody had come to that."
