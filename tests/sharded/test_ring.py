"""Ring collectives against PyTorch's own, and what they send against specs.Collective."""

import pytest
import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.sharded import ring
from course_lib.specs import Collective

WORLDS = (1, 2, 3, 4)
LENGTH = 5  # of a chunk


def both_of_each():
    """Pairs (ours, torch's), on random tensors that differ from rank to rank."""
    n, pairs = dist.get_world_size(), []
    chunks, mine = torch.randn(n, LENGTH), torch.randn(LENGTH)
    scattered, gathered = torch.empty(LENGTH), torch.empty(n, LENGTH)
    dist.reduce_scatter(scattered, list(chunks))
    dist.all_gather(list(gathered), mine)
    pairs += [(ring.reduce_scatter(chunks), scattered), (ring.all_gather(mine), gathered)]
    for shape in ((12,), (3, 7), (1,), ()):
        ours = ring.all_reduce(whole := torch.randn(shape))
        dist.all_reduce(whole)
        pairs.append((ours, whole))
    return pairs


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_results_are_torchs(world_size):
    for pairs in ranks.run(both_of_each, world_size=world_size):
        for ours, torchs in pairs:
            torch.testing.assert_close(ours, torchs)


def each_in_turn():
    """What each logged: [(kind, elements, [(send or recv, peer, bytes), …]), …]."""
    n, logged = dist.get_world_size(), []
    for elements in (12, 7):
        chunk = -(-elements // n)
        for kind, collective, tensor in (
            ("reduce_scatter", ring.reduce_scatter, torch.ones(n, chunk)),
            ("all_gather", ring.all_gather, torch.ones(chunk)),
            ("all_reduce", ring.all_reduce, torch.ones(elements)),
        ):
            before = len(ranks.entries())
            collective(tensor)
            entries = [(e.kind, e.peer, e.payload) for e in ranks.entries()[before:]]
            logged.append((kind, elements, entries))
    return logged


@pytest.mark.parametrize("world_size", WORLDS)
def test_each_rank_sends_to_its_neighbour_what_the_ledger_counts(world_size):
    for rank, logged in enumerate(ranks.run(each_in_turn, world_size=world_size)):
        for kind, elements, entries in logged:
            expected = Collective(kind, elements, 4, world_size)
            for what, neighbour in (("send", rank + 1), ("recv", rank - 1)):
                moved = [nbytes for k, _, nbytes in entries if k == what]
                assert len(moved) == expected.steps
                assert sum(moved) == expected.bytes_per_rank
                assert {p for k, p, _ in entries if k == what} <= {neighbour % world_size}


def keeps_its_input():
    chunks = torch.ones(dist.get_world_size(), LENGTH)
    ring.reduce_scatter(chunks)
    ring.all_reduce(chunks)
    return chunks


def test_what_a_ring_is_given_stays_as_it_was():
    for chunks in ranks.run(keeps_its_input, world_size=3):
        assert bool((chunks == 1).all())
