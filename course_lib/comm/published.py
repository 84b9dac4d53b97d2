"""Published volumes of communication, and the plans that reproduce them.

Sources give what a rank moves in a step as a multiple of P, the number of parameters, counted as
elements of 16 bits. They leave out the ring's factor (N-1)/N, which is near 1 where N is large.

Two are no strategies of specs. A stage 1 that all-reduces is PyTorch's, see zero_redundancy. Of
ZeRO++ (arXiv 2306.10209) the source counts what crosses between nodes: 8-bit parameters for
forward; nothing for backward, which gathers from a second copy that every node keeps in shards;
and gradients in 4 bits, two to a byte, each sent to the rank that owns it.
"""

from dataclasses import dataclass
from pathlib import Path

from course_lib.comm.plan import Line, Plan
from course_lib.comm.step import step
from course_lib.comm.zero_redundancy import zero_redundancy
from course_lib.specs import Collective, ModelSpec, Recipe, Strategy
from course_lib.specs.checking import known
from course_lib.specs.tables import rows

VOLUMES = Path(__file__).parent / "data" / "communication_volume.csv"
ALL_REDUCING, ZERO_PLUS_PLUS = "zero1, all-reduce-based", "zero++ cross-node"
STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero1": {"name": "zero1"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3"},
    "zero3 with gradient accumulation": {"name": "zero3"},
    "fsdp reshard_after_forward=False": {"name": "fsdp", "reshard_after_forward": False},
}
ELEMENT_BYTES, PRECISION = 2, "zero-fp16"
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Volume:
    """A row of the table: `elements` as printed, such as '2P' or '3P per micro-batch'."""

    strategy: str
    elements: str
    note: str


def volumes() -> tuple[Volume, ...]:
    """The rows of the table; the last is the stage 1 that all-reduces, which zero1's note tells."""
    table = [Volume(**row) for row in rows(VOLUMES)]
    (noted,) = (row.note for row in table if row.strategy == "zero1")
    return (*table, Volume(ALL_REDUCING, "3P", noted))


def plan(strategy: str, parameters: int, gpus: int, grad_accum: int = 1) -> Plan:
    """What a rank issues under the strategy of a row, for a bare count of parameters."""
    known("published strategy called", strategy, (*STRATEGIES, ALL_REDUCING, ZERO_PLUS_PLUS))
    if strategy == ZERO_PLUS_PLUS:
        return _zero_plus_plus(parameters, gpus, grad_accum)
    model = ModelSpec("bare count", "bare", count=parameters)
    recipe = Recipe(PRECISION, grad_accum=grad_accum)
    if strategy == ALL_REDUCING:
        return zero_redundancy(model, recipe, gpus)
    return step(model, recipe, Strategy(gpus=gpus, **STRATEGIES[strategy]))


def multiple(strategy: str, parameters: int, gpus: int, grad_accum: int = 1) -> float:
    """What a rank moves in a step, as a multiple of P: of ZeRO++, what crosses between nodes."""
    lines = plan(strategy, parameters, gpus, grad_accum).lines
    if strategy == ZERO_PLUS_PLUS:
        lines = [line for line in lines if line.collectives[0].ranks > GPUS_PER_NODE]
    return sum(line.bytes_per_rank for line in lines) / (ELEMENT_BYTES * parameters)


def _zero_plus_plus(parameters: int, gpus: int, grad_accum: int) -> Plan:
    def line(kind: str, elements: int, itemsize: int, ranks: int, why: str) -> Line:
        return Line((Collective(kind, elements, itemsize, ranks),), why, "micro-batch", grad_accum)

    lines = (
        line("all_gather", parameters, 1, gpus, "8-bit parameters, for forward"),
        line("all_gather", parameters, 2, GPUS_PER_NODE, "parameters for backward, in the node"),
        line("all_to_all", -(-parameters // 2), 1, gpus, "4-bit gradients, two to a byte"),
    )
    return Plan(f"bare count, {parameters:,} parameters; ZeRO++ on {gpus:,} ranks", lines)
