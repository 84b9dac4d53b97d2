"""The collective log: every collective that each rank issued, in order, as plain data.

A rank writes it while it runs (`recorder` tells how), so that what a rank did before it hung or
died can still be read. Each line of the file is one event, a JSON list:

    ["group", name, [ranks]]                                  a process group, at its first use
    ["enter", index, group, seq, kind, elements, dtype, itemsize, peer, [file, line, function], t]
    ["wait", index, t]                                        the rank blocks until it is done
    ["done", index, t]                                        it is done

`index` counts a rank's collectives, `seq` those of one group: where ranks are in step, the same
`seq` of a group is the same collective. A send or recv counts its own `seq`, per pair of ranks.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from course_lib.ranks import stack
from course_lib.ranks.protocol import Frame
from course_lib.specs import Collective


@dataclass(frozen=True)
class Entry:
    """One collective as one rank issued it.

    `kind`, `elements` and `itemsize` are those of specs.Collective, which counts the bytes.
    `members` are the ranks of the group called `group`; `seq` counts from 1. `peer` is the root,
    or the other rank of a send or recv; None where there is none. `frame` is the learner's line.
    Times are in seconds; `end` is None for what never came to an end. `waiting` is True where the
    rank was blocked until it ended, or still is.
    """

    rank: int
    kind: str
    elements: int
    dtype: str
    itemsize: int
    group: str
    members: tuple[int, ...]
    seq: int
    peer: int | None
    frame: Frame | None
    start: float
    end: float | None = None
    waiting: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.members)

    @property
    def collective(self) -> Collective:
        return Collective(self.kind, self.elements, self.itemsize, self.ranks)

    @property
    def payload(self) -> int:
        """Bytes of the whole buffer."""
        return self.collective.payload

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, as a ring moves them."""
        return self.collective.sent

    @property
    def received(self) -> int:
        """Bytes that this rank receives, as a ring moves them."""
        return self.collective.received

    @property
    def bytes_per_rank(self) -> int:
        return self.collective.bytes_per_rank

    @property
    def site(self) -> str:
        """The learner's line that led to it: "cell In[3], line 9"; '' where there is none."""
        return stack.place(self.frame) if self.frame else ""

    def to_dict(self) -> dict:
        """Plain data, ready for JSON."""
        extra = {"ranks": self.ranks, "sent": self.sent, "received": self.received}
        return asdict(self) | extra | {"site": self.site}


class CollectiveLog(Sequence):
    """The entries of each rank: `log[2]` is rank 2's, a tuple in order of issue."""

    def __init__(self, ranks: Iterable[Sequence[Entry]]) -> None:
        self._ranks = tuple(tuple(entries) for entries in ranks)

    def __getitem__(self, rank):
        return self._ranks[rank]

    def __len__(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    def counts(self, rank: int = 0) -> dict[str, int]:
        """How many collectives of each kind a rank issued, in order of first use."""
        return dict(Counter(entry.kind for entry in self[rank]))

    def bytes(self, rank: int = 0) -> dict[str, int]:
        """Bytes per rank (`Collective.bytes_per_rank`) that each kind moved."""
        total = Counter()
        for entry in self[rank]:
            total[entry.kind] += entry.bytes_per_rank
        return dict(total)

    def to_list(self) -> list[list[dict]]:
        """Plain data, ready for JSON: for each rank, its entries."""
        return [[entry.to_dict() for entry in entries] for entries in self]

    def __repr__(self) -> str:
        words = (f"{count} {kind}" for kind, count in self.counts().items()) if self else ()
        return f"CollectiveLog of {len(self)} ranks; rank 0: {', '.join(words) or 'nothing'}"


class Reader:
    """Reads what a rank has written so far; `read` again gives what has come since, too."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self._path, self._offset = rank, path, 0
        self._groups: dict[str, tuple[int, ...]] = {}
        self._entries: list[Entry] = []

    def read(self) -> tuple[Entry, ...]:
        """All entries so far. A line that is not whole yet is left for the next time."""
        for event, *values in self._events():
            if event == "group":
                self._groups[values[0]] = tuple(values[1])
            elif event == "enter":
                self._entries.append(self._entry(*values))
            else:
                index, time = values
                change = {"waiting": True} if event == "wait" else {"end": time}
                self._entries[index] = replace(self._entries[index], **change)
        return tuple(self._entries)

    def _events(self) -> Iterator[list]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        yield from map(json.loads, text[:whole].splitlines())

    def _entry(self, index, group, seq, kind, elements, dtype, itemsize, peer, frame, time):
        return Entry(
            rank=self.rank,
            kind=kind,
            elements=elements,
            dtype=dtype,
            itemsize=itemsize,
            group=group,
            members=self._groups[group],
            seq=seq,
            peer=peer,
            frame=Frame(*frame) if frame else None,
            start=time,
        )
