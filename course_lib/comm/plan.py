"""A plan: the collectives that one rank issues in one optimizer step, line by line."""

from dataclasses import dataclass
from itertools import repeat

from course_lib.specs import Collective


@dataclass(frozen=True)
class Line:
    """Collectives of one kind that are issued for one reason.

    `collectives` are those of one round: of each micro-batch, or of the step, as `per` says; there
    are `rounds` of them in a step. `why` is a sentence for a learner. Where `between_nodes`, each
    rank of the group is on another node, and the ranks of a node do the same at the same time.

    A large model has very many buckets that are all alike, which stand in `collectives` once:
    `times` says how often each is issued in a row, () where that is once each. See `runs`.
    """

    collectives: tuple[Collective, ...]
    why: str
    per: str = "step"
    rounds: int = 1
    between_nodes: bool = False
    times: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return self.collectives[0].kind

    @property
    def runs(self) -> tuple[tuple[Collective, int], ...]:
        """Each collective of a round, and how many times it is issued in a row."""
        return tuple(zip(self.collectives, self.times or repeat(1), strict=False))

    @property
    def in_a_round(self) -> int:
        """How many collectives a round has of this line."""
        return sum(times for _, times in self.runs)

    @property
    def count(self) -> int:
        """How many collectives a step has of this line."""
        return self.rounds * self.in_a_round

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that pass through a rank in a step, in each direction: see specs.Collective."""
        return self.rounds * sum(each.bytes_per_rank * times for each, times in self.runs)


@dataclass(frozen=True, repr=False)
class Plan:
    """What one rank issues in a step. It draws itself, in a notebook and in a terminal."""

    title: str
    lines: tuple[Line, ...]

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that pass through a rank in one step, in each direction."""
        return sum(line.bytes_per_rank for line in self.lines)

    @property
    def count(self) -> int:
        """How many collectives a rank issues in one step."""
        return sum(line.count for line in self.lines)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """For each kind of collective: how many, and bytes per rank."""
        kinds: dict[str, tuple[int, int]] = {}
        for line in self.lines:
            count, nbytes = kinds.get(line.kind, (0, 0))
            kinds[line.kind] = (count + line.count, nbytes + line.bytes_per_rank)
        return kinds

    def counts(self) -> dict[str, int]:
        """How many of each kind: what `log.counts(rank)` of a run gives."""
        return {kind: count for kind, (count, _) in self.by_kind().items()}

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes per rank of each kind: what `log.bytes(rank)` of a run gives."""
        return {kind: nbytes for kind, (_, nbytes) in self.by_kind().items()}

    def to_dict(self) -> dict:
        """Plain data, ready for JSON: `communication` in `course ledger --json`."""
        return {
            "per_step": [
                {
                    "collective": line.kind,
                    "count": line.count,
                    "bytes_per_rank": line.bytes_per_rank,
                    "why": line.why,
                }
                for line in self.lines
            ],
            "total_bytes_per_rank": self.bytes_per_rank,
        }

    def __repr__(self) -> str:
        from course_lib.comm.table import text

        return text(self)

    def _repr_html_(self) -> str:
        from course_lib.comm.table import html

        return html(self)
