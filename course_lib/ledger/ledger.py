"""A ledger: what one rank holds, line by line, in bytes, and how each line comes about."""

from dataclasses import asdict, dataclass

from course_lib.specs import MODEL_STATES, ModelSpec, Recipe, Strategy
from course_lib.specs.recipe import GRADIENTS, OPTIMIZER_STATES, PARAMETERS


@dataclass(frozen=True)
class Line:
    """One thing that a rank holds.

    `formula` is the arithmetic of its bytes, elements × bytes, with the numbers; `share` says where
    the number of elements comes from, '' where that is all of them. `host`: it is in the host's
    memory, not on the GPU.
    """

    category: str
    what: str
    bytes: int
    formula: str
    share: str = ""
    host: bool = False


@dataclass(frozen=True, repr=False)
class Ledger:
    """The bytes of the rank that holds most. It draws itself, in a notebook and in a terminal."""

    model: ModelSpec
    recipe: Recipe
    strategy: Strategy
    lines: tuple[Line, ...]
    categories: tuple[str, ...] = MODEL_STATES  # what it is a ledger of

    def of(self, category: str) -> int:
        """Bytes of a category on the GPU."""
        return sum(x.bytes for x in self.lines if x.category == category and not x.host)

    @property
    def parameters(self) -> int:
        """Bytes of the parameters on the GPU. (Their number is `model.parameters`.)"""
        return self.of(PARAMETERS)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients on the GPU, as they are held until zero_grad."""
        return self.of(GRADIENTS)

    @property
    def optimizer_states(self) -> int:
        """Bytes on the GPU of all that the optimizer keeps, the master copy included."""
        return self.of(OPTIMIZER_STATES)

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return sum(self.by_category().values())

    @property
    def host(self) -> int:
        """Bytes that this rank holds in the host's memory, which all ranks of a node share."""
        return sum(line.bytes for line in self.lines if line.host)

    def by_category(self) -> dict[str, int]:
        """Bytes on the GPU of each category, in the order in which they are stacked."""
        return {category: self.of(category) for category in self.categories}

    def to_dict(self) -> dict:
        """Plain data, ready for JSON: what `course ledger --json` prints beside the job."""
        return {
            "bytes": self.by_category(),
            "host_bytes": self.host,
            "parameters_total": self.model.parameters,
            "lines": [asdict(line) for line in self.lines],
        }

    def __repr__(self) -> str:
        from course_lib.ledger.table import text

        return text(self)

    def _repr_html_(self) -> str:
        from course_lib.ledger.table import html

        return html(self)
