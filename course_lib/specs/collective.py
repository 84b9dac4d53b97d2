"""Collectives: what crosses between ranks, counted as a ring moves it.

N ranks stand in a ring, and each sends to its right neighbour what it got from its left one. A
buffer of E elements is cut into N chunks of ceil(E/N), the last ones padded.

reduce_scatter  N-1 steps of one chunk: partial sums travel, until each rank holds one chunk's sum
all_gather      N-1 steps of one chunk: each rank's chunk travels, until all ranks hold all chunks
all_reduce      a reduce_scatter, then an all_gather: 2(N-1) steps
all_to_all      each rank keeps one chunk and sends the N-1 others to their owners
gather, scatter the root receives, or sends, every chunk but its own
broadcast       the whole buffer passes along the ring, once; reduce likewise, in the other sense
send, recv      the whole buffer, from one rank to one other
barrier         nothing but a sign of life

These are the bytes that the algorithm needs, which a ledger counts; a backend may move more.
Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
in MPICH", sections 4.1 to 4.5.
"""

from dataclasses import dataclass

from course_lib.specs.checking import known, whole

ROUNDS = {  # how many times each rank sends a chunk to its neighbour, in units of N - 1
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "gather": 1,
    "scatter": 1,
}
WHOLE = ("broadcast", "reduce", "send", "recv")
KINDS = (*ROUNDS, *WHOLE, "barrier")


@dataclass(frozen=True)
class Collective:
    """One collective of `ranks` ranks on a buffer of `elements` × `itemsize` bytes.

    `kind` is one of KINDS. The buffer is the whole one: what an all_gather gives, what a
    reduce_scatter is given.
    """

    kind: str
    elements: int
    itemsize: int
    ranks: int

    def __post_init__(self) -> None:
        known("collective called", self.kind, KINDS)
        whole("elements", self.elements, least=0)
        whole("itemsize", self.itemsize)
        whole("ranks", self.ranks)

    @property
    def payload(self) -> int:
        """Bytes of the whole buffer."""
        return self.elements * self.itemsize

    @property
    def steps(self) -> int:
        """How many messages follow one another along the ring: each waits for the one before."""
        if self.kind in ("send", "recv"):
            return 1
        if self.kind in ROUNDS:
            return ROUNDS[self.kind] * (self.ranks - 1)
        return self.ranks - 1

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that pass through the rank which moves most, in each direction of its links."""
        if self.kind == "barrier" or self.ranks == 1:
            return 0
        if self.kind in ROUNDS:
            chunk = -(-self.elements // self.ranks)
            return ROUNDS[self.kind] * (self.ranks - 1) * chunk * self.itemsize
        return self.payload

    @property
    def sent(self) -> int:
        """`bytes_per_rank`, but none for a recv, which only receives."""
        return 0 if self.kind == "recv" else self.bytes_per_rank

    @property
    def received(self) -> int:
        """`bytes_per_rank`, but none for a send, which only sends."""
        return 0 if self.kind == "send" else self.bytes_per_rank
