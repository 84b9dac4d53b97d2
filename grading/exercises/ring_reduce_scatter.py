"""03-reduce-scatter: partial sums travel around the ring."""

import torch
import torch.distributed as dist

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Answer, Exercise, Misconception
from course_lib.sharded import ring
from grading.exercises.on_a_ring import (
    DEADLOCK,
    blocking,
    in_one_batch,
    me,
    numbers,
    on_a_ring,
    ring_case,
    summed,
    to_the_left,
)


def _sums(start: int, extra=0, pass_on: Answer = ring.exchange, add=torch.add):
    """A ring that begins with chunk rank + start, and runs N - 1 steps, and `extra` more."""

    def answer(chunks):
        rank, n = me()
        partial = chunks[(rank + start) % n].clone()
        for step in range(1, n + extra):
            partial = add(pass_on(partial), chunks[(rank + start - step) % n])
        return partial

    return answer


def _sums_to_the_left(chunks):
    rank, n = me()
    for step in range(n - 1):
        partial = chunks[(rank + 1 + step) % n]
        chunks[(rank + 2 + step) % n] += to_the_left(partial)
    return chunks[rank]


def _gather_and_scatter(chunks):
    rank, n = me()
    everyones = [torch.empty_like(chunks) for _ in range(n)] if rank == 0 else None
    dist.gather(chunks, everyones)
    mine = torch.empty_like(chunks[0])
    dist.scatter(mine, list(sum(everyones)) if rank == 0 else None)
    return mine


def _reduce_and_scatter(chunks):
    rank = dist.get_rank()
    total, mine = chunks.clone(), torch.empty_like(chunks[0])
    dist.reduce(total, 0)
    dist.scatter(mine, list(total) if rank == 0 else None)
    return mine


def _torchs_reduce_scatter(chunks):
    mine = torch.empty_like(chunks[0])
    dist.reduce_scatter(mine, list(chunks))
    return mine


def _straight_to_the_owners(chunks):
    rank, n = me()
    total = chunks[rank].clone()
    for other in range(n):
        if other != rank:
            incoming = torch.empty_like(total)
            sending = dist.isend(chunks[other], other)
            dist.recv(incoming, other)
            sending.wait()
            total += incoming
    return total


def _whole_buffers(chunks):
    travelling = total = chunks
    for _ in range(dist.get_world_size() - 1):
        travelling = ring.exchange(travelling)
        total = total + travelling
    return total[dist.get_rank()]


def _own_parts_only(chunks):
    """Sends its own part at each step, never the sum so far."""
    rank, n = me()
    for step in range(1, n):
        received = ring.exchange(chunks[(rank - step) % n].clone())
        mine = received + chunks[(rank - 1 - step) % n]
    return mine


REDUCE_SCATTER = Exercise(
    id="03-reduce-scatter",
    title="Ring reduce-scatter",
    task="Return the sum over ranks of chunk `rank`, in N - 1 steps of one chunk each.",
    points={"all": 4},
    reference=ring.reduce_scatter,
    library=(ring.reduce_scatter,),
    alternatives=(_sums_to_the_left, _sums(start=-1, pass_on=in_one_batch)),
    cases=(ring_case([[[100 * r + 10.0 * c + 1] for c in range(3)] for r in range(3)]),),
    fresh=lambda rng: [ring_case(numbers(rng, n := rng.choice((2, 4)), n, 2))],
    run=on_a_ring,
    compare=close(1e-4, 1e-4),
    nudge="What you send in a step is what you received and added to in the step before.",
    misconceptions=(
        Misconception(
            "one chunk late",
            _sums(start=0),
            "Your sums are right, but they end on the wrong rank: each rank has the sum of chunk "
            "rank + 1. A chunk's sum must come home to its owner in the last step.",
            "So it starts on the owner's right neighbour: the first thing you send is chunk "
            "rank - 1, not your own.",
        ),
        Misconception(
            "overwrites instead of adding",
            _sums(start=-1, add=lambda received, own: received),
            "You replace your part by what you received: the chunk travels, but nothing is ever "
            "added to it.",
            "Add your own part of the same chunk before you pass it on.",
        ),
        Misconception(
            "its own part alone",
            _sums(start=-1, add=lambda received, own: own.clone()),
            "You return your own part of your chunk, to which nothing was added. Add what you "
            "receive to your part of the same chunk, pass the sum on, and let it end on its owner.",
            "If your first send is chunk rank - 1, what comes in the last step is chunk rank.",
        ),
        Misconception(
            "passes on its own part",
            _own_parts_only,
            "Your sums hold two ranks' parts. In each step you send your own part of a chunk; pass "
            "on the partial sum instead, what you received plus your own.",
        ),
        Misconception(
            "the mean",
            lambda chunks: _sums(start=-1)(chunks) / dist.get_world_size(),
            "You divided by N: this one sums, and averaging comes after it.",
        ),
        Misconception(
            "one step too few",
            _sums(start=-1, extra=-1),
            "You stop one step too early: with N - 2 steps each sum is short of one rank's part "
            "and has not come home.",
            "The sum has to pass N ranks, which takes N - 1 steps.",
        ),
        Misconception(
            "one step too many",
            _sums(start=-1, extra=1),
            "You take N steps. After N - 1 every rank's part is in the sum; one more carries it "
            "past its owner and adds a part twice.",
        ),
        Misconception(
            "all-reduce, then cut",
            lambda chunks: summed(chunks)[dist.get_rank()],
            "The result is right, but you called all_reduce and kept 1/N of it. That moves twice "
            "the bytes: every rank was sent all the sums that it throws away.",
            "Send and receive one chunk at a time, N - 1 times.",
        ),
        Misconception(
            "torch's own reduce_scatter",
            _torchs_reduce_scatter,
            "The result is right, and in real code you would call reduce_scatter just so. Here you "
            "build it from its steps.",
            "One step is `ring.exchange(tensor)`.",
        ),
        Misconception(
            "gather, add, scatter",
            _gather_and_scatter,
            "The result is right, but all buffers meet on rank 0: it receives N - 1 whole buffers, "
            "and the other ranks' links idle meanwhile.",
            "In a ring every rank sends and receives one chunk in every step.",
        ),
        Misconception(
            "reduce, then scatter",
            _reduce_and_scatter,
            "The result is right, but rank 0 gets all the sums and then hands them out: they "
            "travel twice, and all through one rank.",
            "Let each chunk's sum end on its owner to begin with.",
        ),
        Misconception(
            "straight to the owners",
            _straight_to_the_owners,
            "Right sums and right bytes, but each rank sends to all others. That is an all-to-all: "
            "it needs a path between every two ranks, where a ring needs one to the neighbour.",
            "Send to the same neighbour in every step.",
        ),
        Misconception(
            "whole buffers travel",
            _whole_buffers,
            "The result is right, but you pass on all N chunks in every step: N times the bytes.",
            "One chunk a step is enough; which one changes from step to step.",
        ),
        Misconception(
            "all wait in the same call",
            _sums(start=-1, pass_on=blocking),
            "The ranks wait for each other, and none can go on: all send first, or all receive "
            "first, or not all take part in every step.",
            f"{DEADLOCK} A recv returns only when something was sent. `ring.exchange(tensor)` does "
            "both right.",
        ),
    ),
)
