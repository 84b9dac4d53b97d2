"""Do the ranks call the same collectives? Told from their logs alone.

All members of a group have to call the same collectives in the same order. So the n-th collective
of a group is one `Call`, which each member has to enter, and all alike; a send and the recv that
takes it are a call of two. A call stays open until every party has entered it. From the open calls
it is certain that a run cannot end well when

    Mismatch   the parties entered the same call with different collectives, sizes, types or roots
    Absent     a party returned without entering it
    Deadlock   each of some ranks waits in a call that another one of them has yet to enter

Nothing is claimed of a rank that computes, that has started a collective and not waited for it,
or that waits for one which all have entered: it may come to an end.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from course_lib.ranks.log import PAIRED, Entry


@dataclass(frozen=True)
class Call:
    """What `parties` have to enter together; `entries` are those of the ranks that have."""

    parties: tuple[int, ...]
    entries: tuple[Entry, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        entered = {entry.rank for entry in self.entries}
        return tuple(rank for rank in self.parties if rank not in entered)

    @property
    def sides(self) -> list[tuple[Entry, ...]]:
        """The entries that agree with one another, the fewest first."""
        sides: dict[tuple, list[Entry]] = {}
        for entry in self.entries:
            sides.setdefault(_signature(entry), []).append(entry)
        return sorted(map(tuple, sides.values()), key=len)


@dataclass(frozen=True)
class Mismatch:
    """The call has more than one side."""

    call: Call


@dataclass(frozen=True)
class Absent:
    """`ranks` returned and have never entered the call."""

    call: Call
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Deadlock:
    """Each rank that made one of these entries waits in it for ranks which cannot enter it."""

    entries: tuple[Entry, ...]
    missing: tuple[tuple[int, ...], ...]  # of each entry


Verdict = Mismatch | Absent | Deadlock


class Calls:
    """The open calls of a run; `add` them as the logs grow, then ask for a verdict."""

    def __init__(self) -> None:
        self._open: dict[tuple, dict[int, Entry]] = {}
        self._added: Counter = Counter()  # how many entries of each rank
        self._takes_any: set[tuple[str, int]] = set()  # group, rank: it receives from any rank

    def add(self, rank: int, entries: Sequence[Entry]) -> None:
        """`entries` are all those of the rank so far."""
        for entry in entries[self._added[rank] :]:
            if entry.kind == "recv" and entry.peer is None:
                self._takes_any.add((entry.group, rank))
                continue
            key = _key(entry)
            entered = self._open.setdefault(key, {})
            entered[rank] = entry
            if len(entered) == len(_parties(key)) and _alike(entered.values()):
                del self._open[key]
        self._added[rank] = len(entries)

    def verdict(self, blocked: Mapping[int, Entry], returned: Set[int]) -> Verdict | None:
        """`blocked` is what each rank that is blocked now waits for."""
        return self.mismatch() or self.absent(returned) or self.deadlock(blocked, returned)

    def mismatch(self) -> Mismatch | None:
        """The first call that its parties entered in different ways."""
        calls = [self._call(key) for key, by in self._open.items() if not _alike(by.values())]
        return Mismatch(_first(calls)) if calls else None

    def absent(self, returned: Set[int]) -> Absent | None:
        """The first collective that a rank would have had to enter before it returned."""
        calls = [self._call(key) for key in self._open if key[-1] == "collective"]
        calls = [call for call in calls if returned.intersection(call.missing)]
        return _absent(_first(calls), returned) if calls else None

    def deadlock(
        self, blocked: Mapping[int, Entry], returned: Set[int]
    ) -> Absent | Deadlock | None:
        """The ranks that wait for each other, or for a message of a rank that has returned."""
        missing = {rank: self._missing(entry) for rank, entry in blocked.items()}
        stuck = set(missing)
        while free := {r for r in stuck if not (stuck | returned).intersection(missing[r])}:
            stuck -= free
        entries = tuple(blocked[rank] for rank in sorted(stuck))
        for entry in entries:
            if returned.intersection(missing[entry.rank]):
                return _absent(self._call(_key(entry)), returned)
        return Deadlock(entries, tuple(missing[e.rank] for e in entries)) if entries else None

    def _call(self, key: tuple) -> Call:
        by = self._open[key]
        return Call(_parties(key), tuple(by[rank] for rank in sorted(by)))

    def _missing(self, entry: Entry) -> tuple[int, ...]:
        """Who has yet to enter it; nobody, where that cannot be told."""
        if entry.kind == "recv" and entry.peer is None:
            return ()
        key = _key(entry)
        taker = (entry.group, _parties(key)[-1])
        if key not in self._open or (entry.kind in PAIRED and taker in self._takes_any):
            return ()
        return self._call(key).missing


def _key(entry: Entry) -> tuple:
    """What the parties' entries of one call have in common: group, parties, place in order."""
    if entry.kind in PAIRED:
        ways = (entry.rank, entry.peer)
        pair = ways if entry.kind == "send" else ways[::-1]
        return entry.group, pair, entry.seq, entry.tag, "message"
    return entry.group, entry.members, entry.seq, 0, "collective"


def _parties(key: tuple) -> tuple[int, ...]:
    return key[1]


def _signature(entry: Entry) -> tuple:
    """What has to be the same on all parties."""
    if entry.kind in PAIRED:
        return entry.elements, entry.dtype
    # What a rank gives to an all_to_all may differ from rank to rank.
    elements = 0 if entry.kind == "all_to_all" else entry.elements
    return entry.kind, elements, entry.dtype, entry.peer


def _alike(entries) -> bool:
    """A recv may have room to spare; all else has to be the same."""
    room = {entry.kind: entry.payload for entry in entries if entry.kind in PAIRED}
    if room:
        return room.get("send", 0) <= room.get("recv", math.inf)
    return len(set(map(_signature, entries))) <= 1


def _first(calls: list[Call]) -> Call:
    return min(calls, key=lambda call: min(entry.start for entry in call.entries))


def _absent(call: Call, returned: Set[int]) -> Absent:
    return Absent(call, tuple(rank for rank in call.missing if rank in returned))
