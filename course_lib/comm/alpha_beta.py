"""Alpha and beta: what a message costs in time, and so a collective.

A message of n bytes takes alpha + n·beta seconds: alpha to get going, however small it is, beta for
each byte (1/beta is the bandwidth). Where all ranks are joined by links of one kind, a collective
takes

    steps · alpha  +  bytes · beta

ring  steps and bytes are those of specs.Collective: an all_reduce makes 2(N-1) steps and moves
      2(N-1)/N of the buffer. No algorithm moves less; but its steps grow with N.
tree  an all_reduce is a reduce up a tree and a broadcast down it, of ceil(log2 N) steps each. One
      binary tree leaves half of its links idle; two trees over the same ranks, each for half of the
      buffer, use them all, so that each way moves the buffer once. More bytes, fewer steps.

Sources: Hockney 1994, "The communication challenge for MPP"; Thakur, Rabenseifner and Gropp 2005;
Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan".
"""

from dataclasses import dataclass, replace

from course_lib.errors import CourseError
from course_lib.specs import Collective
from course_lib.specs.checking import known

ALGORITHMS = ("ring", "tree", "hierarchical")  # the last is a ring where all links are alike
WAYS = {"all_reduce": 2, "broadcast": 1, "reduce": 1}  # how often a tree is walked


@dataclass(frozen=True)
class AlphaBeta:
    """Links of one kind: `alpha` seconds for a message, `beta` seconds for each of its bytes."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for what, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise CourseError(f"{what} is {value!r}: give seconds, 0 or more.")

    @property
    def bandwidth(self) -> float:
        """Bytes a second, in each direction; inf where bytes cost nothing."""
        return 1 / self.beta if self.beta else float("inf")

    @property
    def between(self) -> "AlphaBeta":
        """The links between nodes: these, as all are alike."""
        return self

    def seconds(self, collective: Collective, algorithm: str = "ring") -> float:
        """Seconds that the collective takes."""
        steps, nbytes = work(collective, algorithm)
        return steps * self.alpha + nbytes * self.beta


def work(collective: Collective, algorithm: str = "ring") -> tuple[int, int]:
    """How many messages follow one another, and how many bytes pass through a rank.

    Raises CourseError for an unknown algorithm, and for a collective that no tree carries.
    """
    known("algorithm called", algorithm, ALGORITHMS)
    if algorithm != "tree":
        return collective.steps, collective.bytes_per_rank
    if collective.kind not in WAYS:
        raise CourseError(
            f"A tree carries {', '.join(WAYS)}, and you gave it {collective.kind}: take a ring."
        )
    ways, once = WAYS[collective.kind], replace(collective, kind="broadcast")
    return ways * height(collective.ranks), ways * once.bytes_per_rank


def height(ranks: int) -> int:
    """The steps from the root of a binary tree of `ranks` ranks to its leaves: ceil(log2)."""
    return (ranks - 1).bit_length()
