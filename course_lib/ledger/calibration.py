"""Published jobs with a measured peak, and what the ledger predicts for each.

What their sources say of the code that ran is in data/measured_memory.csv. None of it is fitted:
kernels are what the code calls, and two terms are the implementations' own. fully_shard was told to
leave the last block whole after forward (`keeps_last`); FSDP1 records streams, so that two blocks
wait to be freed (`frees_late`). Where a model was compiled, norms and SwiGLU are one kernel each.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from course_lib import specs
from course_lib.ledger.execution import Execution
from course_lib.ledger.peak import peak
from course_lib.ledger.replay import Peak
from course_lib.specs.tables import rows

DATA = Path(__file__).parent / "data"
FREES_LATE = 2  # blocks under FSDP1: its rate limiter lets as many be under way


@dataclass(frozen=True)
class Published:
    """A job and its published peak: `kind` is 'peak active' or 'peak reserved'.

    `calibrates`: it is one of the rows that the ledger is held to.
    """

    source: str
    calibrates: bool
    model: specs.ModelSpec
    recipe: specs.Recipe
    strategy: specs.Strategy
    execution: Execution
    tuning: dict
    kind: str
    gib: float

    def predicted(self) -> Peak:
        return peak(self.model, self.recipe, self.strategy, self.execution, **self.tuning)

    @property
    def error(self) -> float:
        """Of an active peak: predicted over published, less 1."""
        return self.predicted().bytes / 2**30 / self.gib - 1

    @property
    def is_inside(self) -> bool:
        """Of a reserved peak: is it inside of the predicted interval?"""
        predicted = self.predicted()
        return predicted.bytes <= self.gib * 2**30 <= predicted.apart


def measured_memory() -> tuple[Published, ...]:
    """The published jobs, in the order of the table."""
    return tuple(job(row) for row in rows(DATA / "measured_memory.csv"))


def job(row: dict[str, str]) -> Published:
    """The job of a row of the table."""
    recipe = specs.Recipe(
        row["precision"],
        row["optimizer"],
        int(row["micro_batch"]),
        int(row["seq_len"]),
        checkpointing=row["checkpointing"],
    )
    compiled = row["compile"] != "no"
    execution = Execution(
        norm="fused" if compiled else "unfused",
        activation="fused" if compiled else "unfused",
        keeps_logits=row["logits_kept"] == "yes",
    )
    own = {"frees_late": FREES_LATE} if row["api"] == "fsdp1" else {"keeps_last": True}
    return Published(
        row["source"],
        row["set"] == "calibration",
        replace(specs.model(row["model"]), vocab_size=int(row["vocab"])),
        recipe,
        specs.Strategy(row["strategy"], int(row["gpus"])),
        execution,
        {"reduce": row["reduce_dtype"], **own},
        row["kind"],
        float(row["value"]),
    )
