"""Whether ranks agree, from their logs alone: no process runs here."""

import itertools

import pytest

from course_lib.ranks import desync, desync_report
from course_lib.ranks.desync import Absent, Calls, Deadlock, Mismatch
from course_lib.ranks.log import Entry


def entry(rank, kind="all_reduce", seq=1, elements=4, members=(0, 1, 2), **more) -> Entry:
    plain = {"dtype": "float32", "itemsize": 4, "group": "0", "peer": None, "frame": None}
    plain["start"] = seq + rank / 100
    return Entry(rank, kind, elements, members=members, seq=seq, **{**plain, **more})


def waits(*args, **more) -> Entry:
    return entry(*args, waiting=True, **more)


def calls(*entries: Entry) -> Calls:
    by_rank: dict[int, list[Entry]] = {}
    for one in entries:
        by_rank.setdefault(one.rank, []).append(one)
    found = Calls()
    for rank, own in by_rank.items():
        found.add(rank, own)
    return found


def verdict(*entries: Entry, returned=()):
    blocked = {one.rank: one for one in entries if one.waiting and one.end is None}
    return calls(*entries).verdict(blocked, set(returned))


def tell(found: desync.Verdict, *entries: Entry) -> list[str]:
    return desync_report.tell(found, {one.rank: one for one in entries}).splitlines()


def test_ranks_in_step_agree():
    steps = [entry(rank, seq=seq) for seq in (1, 2, 3) for rank in (0, 1, 2)]
    assert verdict(*steps, returned=(0, 1, 2)) is None


@pytest.mark.parametrize(
    "differing",
    [
        {"kind": "all_gather"},
        {"elements": 5},
        {"dtype": "float64", "itemsize": 8},
        {"kind": "broadcast", "peer": 0},
    ],
)
def test_a_call_that_differs_is_a_mismatch(differing):
    odd = entry(1, **differing)
    found = verdict(entry(0), odd, entry(2))
    assert isinstance(found, Mismatch) and found.call.sides[0] == (odd,)


def test_roots_have_to_agree():
    root = [entry(rank, "broadcast", peer=rank // 2) for rank in range(3)]
    head, *rows = tell(verdict(*root))
    assert head == (
        "rank 2 called broadcast #1 from rank 1 while ranks 0 and 1 called broadcast #1 from rank 0"
    )
    assert len(rows) == 2


def test_ranks_of_an_all_to_all_may_give_different_amounts():
    assert verdict(*(entry(r, "all_to_all", elements=r) for r in range(3))) is None


def test_the_first_mismatch_is_the_story():
    others = [entry(rank, seq=seq) for seq in (1, 2, 3) for rank in (0, 1)]
    skipped = [entry(2, seq=1), entry(2, "barrier", seq=2), entry(2, "broadcast", seq=3, peer=0)]
    found = verdict(*others, *skipped)
    assert {one.seq for one in found.call.entries} == {2}


def test_two_of_different_groups_are_not_compared():
    one = entry(0, "all_gather", members=(0, 1), group="1")
    assert verdict(one, entry(2, members=(2, 3), group="1")) is None
    assert verdict(one, entry(0, members=(0, 1), group="2")) is None


def test_more_than_two_sides_are_a_table():
    entries = [entry(0), entry(1, "barrier", elements=0), entry(2, "all_gather")]
    head, *rows = tell(verdict(*entries))
    assert head == "the ranks do not agree on collective #1"
    assert [row.split()[:3] for row in rows] == [
        ["rank", "0", "all_reduce"],
        ["rank", "1", "barrier"],
        ["rank", "2", "all_gather"],
    ]
    assert len({row.index("#1") - len(row.split()[2]) for row in rows}) == 1  # aligned


def test_a_rank_that_has_not_come_yet_is_told_with_its_last():
    entries = [entry(0, seq=2), entry(1, "barrier", elements=0, seq=2), entry(2)]
    rows = tell(verdict(*entries), *entries)[1:]
    assert rows[2] == "  rank 2  after all_reduce #1  4 float32, 16 bytes"


def test_a_rank_that_returned_and_is_missed():
    entries = [waits(0, seq=2), waits(1, seq=2), entry(2)]
    found = verdict(*entries, returned={2})
    assert isinstance(found, Absent) and found.ranks == (2,)
    assert tell(found, *entries) == [
        "rank 2 returned without calling all_reduce #2, which ranks 0 and 1 wait for",
        "  ranks 0 and 1  all_reduce #2                 4 float32, 16 bytes",
        "  rank 2         returned after all_reduce #1  4 float32, 16 bytes",
    ]


def test_a_rank_that_called_nothing_and_is_missed():
    entries = [waits(0), waits(1)]
    assert tell(verdict(*entries, returned={2}), *entries)[-1].endswith("called no collective")


def test_who_returned_is_missed_where_nobody_is_seen_to_wait():  # DDP waits in C++
    found = verdict(entry(0), entry(1), returned={2})
    assert tell(found)[0].endswith("all_reduce #1, which ranks 0 and 1 called")


def test_a_rank_that_computes_is_not_missed():
    assert verdict(waits(0), waits(1)) is None


def test_what_is_not_waited_for_is_not_stuck():
    ahead = [entry(0), entry(0, seq=2), waits(0, "barrier", seq=3)]
    assert verdict(*ahead, entry(1)) is None


def test_what_all_have_entered_may_end():
    assert verdict(waits(0), waits(1), waits(2)) is None
    assert verdict(waits(0), waits(1), entry(2)) is None


def ring(size: int, **more) -> list[Entry]:
    options = {"members": tuple(range(size)), **more}
    return [waits(rank, "send", peer=(rank + 1) % size, **options) for rank in range(size)]


def test_a_ring_of_sends_is_a_deadlock():
    found = verdict(*ring(3))
    assert found == Deadlock(tuple(ring(3)), ((1,), (2,), (0,)))
    head, *rows, hint = tell(found)
    assert head == "ranks 0-2 wait for each other, and none of them can go on"
    assert rows[2] == "  rank 2  send #1 to rank 0  4 float32, 16 bytes  waiting for rank 0"
    assert "isend" in hint


def test_a_ring_in_which_one_can_go_on_is_not():
    assert verdict(*ring(3)[:2]) is None  # rank 2 may be about to receive
    received = entry(1, "recv", peer=0)
    assert verdict(*ring(3), received) is None


def test_a_long_table_is_cut():
    rows = tell(verdict(*ring(64)))
    assert len(rows) == 11 and rows[-2] == "  … and 56 more"


def test_sends_and_recvs_are_paired_in_order_and_by_tag():
    first = entry(0, "send", peer=1, end=1.5), entry(1, "recv", peer=0, end=1.5)
    second = waits(0, "send", seq=2, peer=1), waits(1, "recv", seq=2, peer=0)
    assert verdict(*first, *second) is None
    tagged = waits(0, "send", peer=1, tag=1), waits(1, "recv", peer=0, tag=2)
    found = verdict(*tagged)
    assert isinstance(found, Deadlock) and "send #1 to rank 1 with tag 1" in tell(found)[1]


def test_a_message_of_another_size_is_a_mismatch():
    found = verdict(entry(0, "send", peer=1), entry(1, "recv", peer=0, elements=3))
    assert tell(found)[0] == (
        "rank 0 called send #1 to rank 1 with 4 float32 while rank 1 called recv #1 from rank 0 "
        "with 3 float32"
    )
    roomy = verdict(entry(0, "send", peer=1), entry(1, "recv", peer=0, elements=9))
    assert roomy is None


def test_a_message_that_nobody_will_take():
    found = verdict(waits(0, "send", peer=1), returned={1})
    assert tell(found)[0] == (
        "rank 1 returned without calling recv #1 from rank 0, which rank 0 waits for"
    )
    assert verdict(entry(0, "send", peer=1), returned={0, 1}) is None  # an isend, never waited for


def test_nothing_is_claimed_where_a_rank_receives_from_any():
    any_source = waits(1, "recv", peer=None)
    assert verdict(waits(0, "send", peer=1), any_source) is None
    assert verdict(waits(0, "recv", peer=1), any_source) is None


def test_groups_in_different_order_are_a_deadlock():
    rows, columns = {"members": (0, 1), "group": "1"}, {"members": (0, 1), "group": "2"}
    found = verdict(waits(0, **rows), waits(1, **columns), waits(2, "barrier", elements=0))
    assert isinstance(found, Deadlock) and found.missing == ((1,), (0,), (0, 1))


def test_who_waits_for_a_rank_that_can_go_on_is_not_stuck():
    """Rank 0 waits for 1, who waits for 2, who computes: against all subsets of who is blocked."""
    chain = [
        waits(0, members=(0, 1), group="1"),
        waits(1, members=(1, 2), group="2"),
        waits(2, members=(0, 2), group="3"),
    ]
    for some in itertools.chain.from_iterable(itertools.combinations(chain, n) for n in (1, 2)):
        assert verdict(*some) is None
    assert isinstance(verdict(*chain), Deadlock)


def test_what_comes_bit_by_bit_is_judged_as_if_at_once():
    found = Calls()
    found.add(0, [entry(0)])
    found.add(1, [entry(1)])
    found.add(0, [entry(0), entry(0, seq=2)])
    found.add(2, [entry(2), entry(2, "barrier", seq=2, elements=0)])
    assert isinstance(found.mismatch(), Mismatch)


def test_bytes_and_the_group_are_named():
    one = waits(0, members=(0, 2), group="5", elements=1, dtype="uint8", itemsize=1)
    row = tell(verdict(one, returned={2}))[1]
    assert "all_reduce #1 of ranks 0 and 2  1 uint8, 1 byte" in row
