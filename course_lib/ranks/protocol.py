"""What the parent tells its ranks, and what it hears of them: plain data, to be sent and told.

All ranks of a run get the same `Job`. A rank that comes to the end of its function reports
`Returned`, `Raised` or `Unsendable` over its pipe. For a rank that cannot speak any more, or has
not spoken in time, the parent puts `Died` or `Unfinished` in its place. So after a run every rank
has exactly one outcome.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One run. `work` is the packed (fn, args); `folder` is there as long as the run."""

    work: bytes
    world_size: int
    folder: Path
    timeout: float  # seconds
    seed: int | None  # each rank adds its number; None: no seed
    environment: Mapping[str, str]
    zero: float = field(default_factory=time.monotonic)  # when the log's clock starts, for all

    def output(self, rank: int) -> Path:
        """Where a rank's prints and warnings go."""
        return self.folder / f"output-{rank}"

    def where(self, rank: int) -> Path:
        """Where a rank writes its main thread's number and, when it is asked, its stacks."""
        return self.folder / f"where-{rank}"

    def log(self, rank: int) -> Path:
        """Where a rank writes its collectives."""
        return self.folder / f"log-{rank}"


@dataclass(frozen=True)
class Frame:
    """One line of a stack; stacks run from the outermost call to the innermost."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Returned:
    """The function's value, as `wire.pack` made it."""

    packed: bytes


@dataclass(frozen=True)
class Unsendable:
    """The function returned a value of this type, which could not be pickled or read again."""

    type: str
    reason: str


@dataclass(frozen=True)
class Raised:
    """An exception left the function; `packed` holds the exception itself where it can be sent."""

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    packed: bytes | None = None


@dataclass(frozen=True)
class Died:
    """The process ended before it reported; a negative exit code is the signal that ended it."""

    exit_code: int | None


@dataclass(frozen=True)
class Unfinished:
    """The rank was still at work when the run was ended; `frames` says where, if it could tell."""

    frames: tuple[Frame, ...] = ()


Outcome = Returned | Unsendable | Raised | Died | Unfinished
