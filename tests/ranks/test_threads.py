"""Ranks whose threads communicate: no false alarm, and a whole log."""

import threading

import torch
import torch.distributed as dist

from course_lib import ranks


def test_threads_with_groups_of_their_own():
    def fn():
        groups = [dist.new_group([0, 1]) for _ in range(4)]

        def work(group):
            for _ in range(50):
                dist.all_reduce(torch.ones(4), group=group)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    log = ranks.run(fn, world_size=2).log
    assert [log.counts(rank)["all_reduce"] for rank in range(2)] == [200, 200]
    for entries in log:
        for group in {entry.group for entry in entries}:
            seqs = [entry.seq for entry in entries if entry.group == group]
            assert seqs == sorted(seqs)


def test_a_recv_may_have_room_to_spare():
    def fn():
        if dist.get_rank() == 0:
            dist.send(torch.arange(4.0), 1)
            return None
        buffer = torch.zeros(8)
        dist.recv(buffer, 0)
        return buffer.tolist()

    assert ranks.run(fn, world_size=2)[1] == [0, 1, 2, 3, 0, 0, 0, 0]
