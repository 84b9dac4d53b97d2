"""The collective log: every collective that each rank issued, in order, as plain data.

A rank writes it to a file while it runs (`recorder` tells how, `reader` what the file holds), so
that what a rank did before it hung or died can still be read.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from course_lib.ranks import stack
from course_lib.ranks.protocol import Frame
from course_lib.specs import Collective

PAIRED = ("send", "recv")  # a message from one rank to one other


@dataclass(frozen=True)
class Entry:
    """One collective as one rank issued it.

    `kind`, `elements` and `itemsize` are those of specs.Collective, which counts the bytes.
    `members` are the ranks of the group called `group`; `seq` counts from 1. `peer` is the root,
    or the other rank of a send or recv (None for a recv from any); None where there is none. `tag`
    is that of a send or recv. `frame` is the learner's line. Times are in seconds since the run
    began, by one clock for all ranks; `end` is None for what never came to an end. `waiting` is
    True where the rank was blocked until it ended, or still is.
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
    tag: int = 0

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
        """Bytes that the rank which moves most sends, as a ring moves them; none for a recv."""
        return self.collective.sent

    @property
    def received(self) -> int:
        """Bytes that the rank which moves most receives, as a ring moves them; none for a send."""
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

    @property
    def last(self) -> dict[int, Entry]:
        """The last entry of each rank that has one."""
        return {rank: entries[-1] for rank, entries in enumerate(self) if entries}

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


class Results(list):
    """What each rank returned, in rank order; `log` is what each rank communicated."""

    def __init__(self, values: list, log: CollectiveLog) -> None:
        super().__init__(values)
        self.log = log
