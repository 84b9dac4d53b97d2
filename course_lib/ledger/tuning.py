"""How a stage is run, beyond what a Strategy says."""

from collections.abc import Collection
from dataclasses import dataclass

from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.ledger.execution import UPDATES
from course_lib.specs.checking import known


@dataclass(frozen=True)
class Tuning:
    """Options of a stage's implementation.

    `bucket_bytes` is of zero1 and zero2. `prefetch` is how many units zero3, fsdp and hsdp send for
    ahead of use. All else is of fsdp and hsdp, and where it has a name of sharded.FSDP's, it is as
    there: `forward_prefetch` and `backward_prefetch` are in place of `prefetch`; `units` by hand
    are names as in named_modules(); `reduce` is the dtype in which to reduce; `no_sync` is until
    the last micro-batch. `host`: what is offloaded counts, too, as where the device is the host.
    `keeps_last`: the last unit is not freed after forward, as backward begins with it, which
    torchtitan asks of fully_shard. `frees_late` is of how many units the memory waits, after they
    were freed, for the stream that computes: FSDP1 records streams, and allows two.

    `trained` is what part of each tensor that has a gradient is trained. For `copies` and `update`
    see `replay`.
    """

    bucket_bytes: int = BUCKET_BYTES
    prefetch: int = 1
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    gathers: int = 2
    units: Collection[str] | None = None
    reduce: str | None = None
    no_sync: bool = False
    recompute_reshards: bool = False
    host: bool = False
    keeps_last: bool = False
    frees_late: int = 0
    trained: float = 1.0
    copies: bool = True
    update: str = "one by one"

    def __post_init__(self) -> None:
        known("update called", self.update, UPDATES)

    @property
    def ahead(self) -> tuple[int, int]:
        """How many units are sent for ahead of use in forward, and in backward."""
        both = (self.forward_prefetch, self.backward_prefetch)
        return tuple(self.prefetch if count is None else count for count in both)
