"""The slow link: late, in turn, hidden behind what else a rank does, and gone when it is left.

What is slowed is seen by sleeps, which never end early; what is not slowed by an hour of latency,
which no test would survive.
"""

import time

import pytest
import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.errors import CourseError
from course_lib.ranks.slow_link import slow_link

HOUR = 3600.0


def in_turn() -> dict:
    """On 2 ranks an all_reduce of [1000] sends 4,000 bytes, an all_gather to [1000] 2,000."""
    x, whole, shard = torch.ones(1000), torch.zeros(1000), torch.zeros(500)
    start = len(ranks.entries())
    with slow_link(bandwidth=4e4, latency=0.05):  # 0.15, and 0.1 seconds
        dist.all_reduce(x)
        begun = time.monotonic()
        works = [
            dist.all_gather_single(whole, x[:500], async_op=True),
            dist.reduce_scatter_single(shard, x, async_op=True),
        ]
        futures = [work.get_future() for work in works]
        done = [future.done() for future in futures]
        for work in works:
            work.wait()
        took = time.monotonic() - begun
        done += [future.done() for future in futures]
        left = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
    done.append(left.done())  # left when all is done
    entries = ranks.entries()[start:]
    spans = [(e.kind, e.end - e.start, e.waiting) for e in entries]
    return {"done": done, "took": took, "spans": spans, "values": (x[0], whole[999], shard[9])}


def test_one_after_another():
    for found in ranks.run(in_turn, world_size=2):
        assert found["done"] == [False, False, True, True, True]
        assert found["took"] >= 0.19  # the second waits for the first: 0.2 from its issue
        assert found["values"] == (2, 2, 4)
        kinds, seconds, waiting = zip(*found["spans"], strict=True)
        assert kinds == ("all_reduce", "all_gather", "reduce_scatter", "all_reduce")
        assert all(took >= due for took, due in zip(seconds, (0.14, 0.09, 0.19, 0.14), strict=True))
        assert waiting[:3] == (True, True, True)  # one thread does it all, as far as one can see


def not_slowed() -> tuple:
    mine = dist.new_subgroups(2)[0]
    before = dist.Work.get_future
    x = torch.ones(4)
    with slow_link(bandwidth=1.0, latency=HOUR, node=2):
        dist.all_reduce(x, group=mine)
        dist.barrier()
        rank = dist.get_rank()
        if rank == 0:
            dist.send(x, 3)
        elif rank == 3:
            dist.recv(x, 0)
    with slow_link(bandwidth=1e12):
        dist.all_reduce(x)
    dist.all_reduce(x)
    return x[0].item(), dist.Work.get_future is before, _told(), [entry.seq for entry in _own()]


def _own():
    return [entry for entry in ranks.entries() if entry.kind == "all_reduce"]


def _told() -> list[str]:
    told = []
    for link in ({"bandwidth": 0}, {"bandwidth": 1, "latency": -1}, {"bandwidth": 1, "node": 0}):
        with pytest.raises(CourseError) as error, slow_link(**link):
            pass
        told.append(str(error.value))
    with slow_link(bandwidth=1e12), pytest.raises(CourseError) as error, slow_link(bandwidth=1e12):
        pass
    return [*told, str(error.value)]


def test_neighbours_barriers_and_messages_are_not_slowed_and_nothing_stays():
    for x, restored, told, seqs in ranks.run(not_slowed, world_size=4, timeout=60):
        assert x == 2 * 4 * 4 and restored and len(seqs) == 3
        assert "bandwidth of 0" in told[0] and "latency of -1" in told[1] and "node" in told[2]
        assert "within another slow link" in told[3]


def breaks_off() -> None:
    with slow_link(bandwidth=1.0, latency=HOUR):
        dist.all_reduce(torch.ones(4), async_op=True)
        raise ValueError("enough")


def test_an_error_does_not_wait_for_the_link():
    with pytest.raises(ranks.RankError, match="enough"):
        ranks.run(breaks_off, world_size=2, timeout=60)


def test_outside_of_a_rank_there_is_no_link():
    with pytest.raises(CourseError, match="outside of a rank"), slow_link(bandwidth=1.0):
        pass
