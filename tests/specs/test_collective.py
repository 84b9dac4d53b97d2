"""The bytes of a collective, against a ring that is played through, message by message."""

import pytest

from course_lib.errors import CourseError
from course_lib.specs import Collective
from course_lib.specs.collective import KINDS, ROUNDS, WHOLE

SIZES = [(elements, ranks) for elements in (0, 1, 7, 12) for ranks in (1, 2, 3, 4, 8)]


def pass_around(chunks: list[set], first: int) -> tuple[int, int]:
    """Each rank sends one chunk a step to its right neighbour, N-1 times.

    `chunks[rank]` are the chunks it holds; it starts with chunk `rank + first`. Gives how many
    chunks each rank has sent, and how many steps that took.
    """
    ranks = len(chunks)
    for step in range(ranks - 1):
        moving = [(rank + first - step) % ranks for rank in range(ranks)]
        for rank, chunk in enumerate(moving):
            chunks[(rank + 1) % ranks].add(chunk)
    return ranks - 1, ranks - 1


@pytest.mark.parametrize(("elements", "ranks"), SIZES)
def test_a_ring_all_gather(elements, ranks):
    held = [{rank} for rank in range(ranks)]
    sent, steps = pass_around(held, first=0)
    assert all(len(chunks) == ranks for chunks in held)
    gather = Collective("all_gather", elements, 4, ranks)
    chunk = -(-elements // ranks)
    assert (gather.bytes_per_rank, gather.steps) == (sent * chunk * 4, steps)


@pytest.mark.parametrize(("elements", "ranks"), SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(elements, ranks):
    both = [Collective(kind, elements, 2, ranks) for kind in ("reduce_scatter", "all_gather")]
    whole = Collective("all_reduce", elements, 2, ranks)
    assert whole.bytes_per_rank == sum(each.bytes_per_rank for each in both)
    assert whole.steps == sum(each.steps for each in both)


def test_the_factor_is_exact_where_the_ranks_divide_the_buffer():
    for ranks in (2, 4, 8, 64):
        whole = Collective("all_reduce", 64 * 1000, 4, ranks)
        assert whole.bytes_per_rank * ranks == 2 * (ranks - 1) * whole.payload


@pytest.mark.parametrize("kind", WHOLE)
def test_what_moves_whole(kind):
    assert Collective(kind, 10, 4, 5).bytes_per_rank == 40


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_moves_nothing(kind):
    assert Collective(kind, 10, 4, 1).bytes_per_rank == 0


def test_a_send_only_sends_and_a_recv_only_receives():
    send, recv = Collective("send", 10, 4, 2), Collective("recv", 10, 4, 2)
    assert (send.sent, send.received, recv.sent, recv.received) == (40, 0, 0, 40)
    assert send.steps == recv.steps == 1


@pytest.mark.parametrize("kind", ROUNDS)
def test_a_ring_sends_what_it_receives(kind):
    collective = Collective(kind, 100, 4, 8)
    assert collective.sent == collective.received == collective.bytes_per_rank > 0


def test_bad_input_is_named():
    with pytest.raises(CourseError, match="all_reduce"):
        Collective("allreduce", 1, 4, 2)
    with pytest.raises(CourseError, match="ranks is 0"):
        Collective("all_reduce", 1, 4, 0)
