"""The collective log: everything that passes torch.distributed is in it, once, as it was issued."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import ranks
from course_lib.errors import CourseError
from course_lib.ranks.reader import Reader


def one_of_each() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, whole = torch.ones(3), torch.ones(3 * world)
    parts = list(whole.chunk(world))
    dist.all_reduce(whole)
    dist.broadcast(whole, src=1)
    dist.reduce(whole, dst=1)
    dist.all_gather(parts, part)
    dist.all_gather_single(whole, part)
    dist.reduce_scatter(part, parts)
    dist.reduce_scatter_single(part, whole)
    dist.all_to_all_single(torch.empty(3 * world), whole)
    dist.gather(part, parts if rank == 1 else None, dst=1)
    dist.scatter(part, parts if rank == 1 else None, src=1)
    dist.barrier()
    dist.monitored_barrier()


EACH = [  # kind, elements, root, bytes per rank on 3 ranks
    ("all_reduce", 9, None, 2 * 2 * 3 * 4),
    ("broadcast", 9, 1, 36),
    ("reduce", 9, 1, 36),
    ("all_gather", 9, None, 24),
    ("all_gather", 9, None, 24),
    ("reduce_scatter", 9, None, 24),
    ("reduce_scatter", 9, None, 24),
    ("all_to_all", 9, None, 24),
    ("gather", 9, 1, 24),
    ("scatter", 9, 1, 24),
    ("barrier", 0, None, 0),
    ("barrier", 0, None, 0),
]


def test_each_collective_is_logged_as_it_was_issued():
    log = ranks.run(one_of_each, world_size=3).log
    for rank, entries in enumerate(log):
        assert [(e.kind, e.elements, e.peer, e.bytes_per_rank) for e in entries] == EACH
        assert [entry.seq for entry in entries] == list(range(1, len(EACH) + 1))
        assert {entry.rank for entry in entries} == {rank}
        assert all(entry.members == (0, 1, 2) for entry in entries)


def test_starts_are_in_order_and_what_was_waited_for_has_an_end():
    for entries in ranks.run(one_of_each, world_size=3).log:
        starts = [entry.start for entry in entries]
        assert starts == sorted(starts)
        assert all(entry.end is not None and entry.end >= entry.start for entry in entries)


def test_send_and_recv_move_bytes_in_one_direction_and_count_for_each_pair():
    def fn():
        rank, buffer = dist.get_rank(), torch.ones(5, dtype=torch.bfloat16)
        for _ in range(2):
            receive = dist.irecv(buffer, 1 - rank)
            dist.send(torch.ones(5, dtype=torch.bfloat16), 1 - rank)
            receive.wait()

    for rank, entries in enumerate(ranks.run(fn, world_size=2).log):
        assert [(e.kind, e.sent, e.received, e.seq) for e in entries] == [
            ("recv", 0, 10, 1),
            ("send", 10, 0, 1),
            ("recv", 0, 10, 2),
            ("send", 10, 0, 2),
        ]
        assert {(e.peer, e.dtype, e.itemsize) for e in entries} == {(1 - rank, "bfloat16", 2)}
        assert all(entry.waiting and entry.end for entry in entries)


def test_a_group_has_its_own_members_and_counts_for_itself():
    def fn():
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        mine = groups[dist.get_rank() % 2]
        before = len(ranks.entries())
        dist.all_reduce(torch.ones(4), group=mine)
        dist.broadcast(torch.ones(4), src=dist.get_rank() % 2, group=mine)
        return [(e.members, e.seq, e.peer, e.bytes_per_rank) for e in ranks.entries()[before:]]

    even, odd, _ = ranks.run(fn, world_size=3)
    assert even == [((0, 2), 1, None, 16), ((0, 2), 2, 0, 16)]
    assert odd == [((1,), 1, None, 0), ((1,), 2, 1, 0)]


def test_the_call_site_is_the_learners_line():
    def fn():
        dist.all_reduce(torch.ones(1))

    line = fn.__code__.co_firstlineno + 1
    ((entry,),) = ranks.run(fn, world_size=1).log
    assert entry.site.endswith(f"test_log.py, line {line}")


def test_what_cxx_issues_is_logged_at_the_line_that_led_to_it():
    def fn():
        model = nn.parallel.DistributedDataParallel(nn.Linear(7, 5))
        loss = model(torch.ones(2, 7)).sum()
        before = len(ranks.entries())
        loss.backward()
        return ranks.entries()[before:]

    line = fn.__code__.co_firstlineno + 4
    for entries in ranks.run(fn, world_size=2):
        assert [(e.kind, e.elements) for e in entries] == [("all_reduce", 7 * 5 + 5)]
        assert entries[0].site.endswith(f"line {line}") and entries[0].end is not None


def test_fully_shard_is_logged():
    def fn():
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(nn.Linear(7, 5, bias=False))
        model(torch.ones(2, 7)).sum().backward()

    # 5 rows on 2 ranks: 3 each, one of them padding
    for entries in ranks.run(fn, world_size=2).log:
        expected = [("all_gather", 2 * 3 * 7), ("reduce_scatter", 2 * 3 * 7)]
        assert [(e.kind, e.elements) for e in entries] == expected


def test_no_grad_and_inference_mode_are_logged():
    def fn():
        with torch.no_grad():
            dist.all_reduce(torch.ones(1))
        with torch.inference_mode():
            dist.all_reduce(torch.ones(1))

    assert ranks.run(fn, world_size=1).log.counts() == {"all_reduce": 2}


def test_the_meeting_of_the_ranks_is_not_in_the_log():
    assert [list(entries) for entries in ranks.run(dist.get_rank, world_size=2).log] == [[], []]


def test_counts_bytes_and_plain_data():
    log = ranks.run(one_of_each, world_size=3).log
    assert log.counts(1)["all_gather"] == 2 and log.bytes(1)["all_gather"] == 48
    (first, *_), *_ = json.loads(json.dumps(log.to_list()))
    assert first["kind"] == "all_reduce" and first["sent"] == first["received"] == 48
    assert repr(log).startswith("CollectiveLog of 3 ranks; rank 0: 1 all_reduce, 1 broadcast")


def test_results_are_a_list():
    results = ranks.run(dist.get_rank, world_size=2)
    assert results == [0, 1] and isinstance(results, list)


def test_entries_outside_a_rank_say_so():
    with pytest.raises(CourseError, match="outside a rank"):
        ranks.entries()


def test_a_torn_line_is_left_for_later(tmp_path):
    path = tmp_path / "log"
    whole = '["group","0",[0,1]]\n["enter",0,"0",1,"all_reduce",4,"float32",4,null,0,null,0.5]\n'
    path.write_text(whole + '["done",0')
    reader = Reader(1, path)
    (entry,) = reader.read()
    assert entry.end is None and entry.frame is None and entry.site == ""
    with path.open("a") as file:
        file.write(",0.75]\n")
    (entry,) = reader.read()
    assert entry.end == 0.75
