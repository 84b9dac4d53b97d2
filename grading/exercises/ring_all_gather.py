"""03-all-gather: each rank's chunk travels around the ring."""

import torch
import torch.distributed as dist

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Answer, Exercise, Misconception
from course_lib.sharded import ring
from grading.exercises.on_a_ring import (
    DEADLOCK,
    blocking,
    everyones,
    in_one_batch,
    me,
    numbers,
    on_a_ring,
    ring_case,
    summed,
    to_the_left,
)


def _copies(place: Answer, extra: int = 0, pass_on: Answer = ring.exchange):
    """A ring of N - 1 steps, and `extra` more. What comes in step s is put into row place(r, s)."""

    def answer(mine):
        rank, n = me()
        chunks = mine.new_zeros(n, *mine.shape)
        chunks[place(rank, 0) % n] = travelling = mine
        for step in range(1, n + extra):
            travelling = pass_on(travelling)
            chunks[place(rank, step) % n] = travelling
        return chunks

    return answer


def _in_rank_order(rank, step):
    return rank - step


def _to_the_left_by_list(mine):
    rank, n = me()
    arrived = [mine]
    while len(arrived) < n:
        arrived.append(to_the_left(arrived[-1]))
    return torch.stack([arrived[(owner - rank) % n] for owner in range(n)])


def _gather_and_broadcast(mine):
    rank, n = me()
    chunks = mine.new_zeros(n, *mine.shape)
    dist.gather(mine, list(chunks) if rank == 0 else None)
    dist.broadcast(chunks, 0)
    return chunks


def _padded_sum(mine):
    rank, n = me()
    chunks = mine.new_zeros(n, *mine.shape)
    chunks[rank] = mine
    return summed(chunks)


def _always_its_own(mine):
    rank, n = me()
    chunks = mine.new_zeros(n, *mine.shape)
    chunks[rank] = mine
    for step in range(1, n):
        chunks[(rank - step) % n] = ring.exchange(mine)
    return chunks


def _own_forgotten(mine):
    chunks = ring.all_gather(mine)
    chunks[dist.get_rank()] = 0
    return chunks


def _added_up(mine):
    travelling = total = mine
    for _ in range(dist.get_world_size() - 1):
        travelling = ring.exchange(travelling)
        total = total + travelling
    return total


def _whole_tables(mine):
    rank, n = me()
    chunks = mine.new_zeros(n, *mine.shape)
    chunks[rank] = mine
    for step in range(1, n):
        left = (rank - step) % n
        chunks[left] = ring.exchange(chunks)[left]
    return chunks


def _straight_to_everyone(mine):
    rank, n = me()
    chunks = mine.new_zeros(n, *mine.shape)
    chunks[rank] = mine
    for other in range(n):
        if other != rank:
            sending = dist.isend(mine, other)
            dist.recv(chunks[other], other)
            sending.wait()
    return chunks


ALL_GATHER = Exercise(
    id="03-all-gather",
    title="Ring all-gather",
    task="Return the chunks of all ranks, in rank order, in N - 1 steps of one chunk each.",
    points={"all": 3},
    reference=ring.all_gather,
    library=(ring.all_gather,),
    alternatives=(_to_the_left_by_list, _copies(_in_rank_order, pass_on=in_one_batch)),
    cases=(ring_case([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]),),
    fresh=lambda rng: [ring_case(numbers(rng, rng.choice((2, 4)), 3))],
    run=on_a_ring,
    compare=close(1e-5, 1e-5),
    nudge="What you send in a step is what you received in the one before: chunk rank - step.",
    misconceptions=(
        Misconception(
            "always its own chunk",
            _always_its_own,
            "You send your own chunk in every step, so that your right neighbour gets it N - 1 "
            "times and nobody else ever does. Pass on what you have just received.",
        ),
        Misconception(
            "in order of arrival",
            _copies(lambda rank, step: step),
            "Your rows are in order of arrival, your own first, so that no two ranks return the "
            "same table. Row c belongs to rank c.",
            "What arrives in step s was sent s steps ago by rank - s, modulo N.",
        ),
        Misconception(
            "counts the wrong way",
            _copies(lambda rank, step: rank + step),
            "You put what arrives into row rank + step. It comes from the left: in step s from the "
            "rank that lies s to your left.",
        ),
        Misconception(
            "one row off",
            _copies(lambda rank, step: rank - step + 1),
            "Your table is shifted by one row: your own chunk belongs into row rank, what arrives "
            "in step 1 into row rank - 1.",
        ),
        Misconception(
            "one step too few",
            _copies(_in_rank_order, extra=-1),
            "You stop one step too early: a row is still empty. N - 1 chunks have to arrive, one a "
            "step.",
        ),
        Misconception(
            "one step too many",
            _copies(_in_rank_order, extra=1),
            "The result is right, but you take N steps: in the last one your own chunk comes back "
            "to you. N - 1 are enough.",
        ),
        Misconception(
            "own chunk forgotten",
            _own_forgotten,
            "Your own row is empty. Your chunk never arrives from the left: put it there yourself.",
        ),
        Misconception(
            "added up",
            _added_up,
            "You add up what arrives. An all-gather keeps the chunks apart, one row for each rank.",
        ),
        Misconception(
            "torch's own all_gather",
            everyones,
            "The result is right, and in real code you would call all_gather just so. Here you "
            "build it from its steps.",
            "One step is `ring.exchange(tensor)`.",
        ),
        Misconception(
            "gather and broadcast",
            _gather_and_broadcast,
            "The result is right, but it goes by way of rank 0: first it receives all chunks, then "
            "the whole table travels, and the ring's links wait for one rank.",
            "In a ring every rank sends and receives one chunk in every step.",
        ),
        Misconception(
            "sum of padded tables",
            _padded_sum,
            "The result is right, but you all-reduce a table of zeros with your chunk in it: twice "
            "the bytes, most of them zeros.",
            "Send and receive one chunk at a time, N - 1 times.",
        ),
        Misconception(
            "whole tables travel",
            _whole_tables,
            "The result is right, but you send the whole table in every step: N times the bytes.",
            "Your neighbour lacks only the chunk that reached you last.",
        ),
        Misconception(
            "straight to everyone",
            _straight_to_everyone,
            "Right chunks and right bytes, but each rank sends to all others: that needs a path "
            "between every two ranks, where a ring needs one to the neighbour.",
            "Send to the same neighbour in every step.",
        ),
        Misconception(
            "all wait in the same call",
            _copies(_in_rank_order, pass_on=blocking),
            "The ranks wait for each other, and none can go on: all send first, or all receive "
            "first, or not all take part in every step.",
            f"{DEADLOCK} A recv returns only when something was sent. `ring.exchange(tensor)` does "
            "both right.",
        ),
    ),
)
