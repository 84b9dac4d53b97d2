"""Real `torch.distributed` ranks, started from a notebook, a script or a test.

    from course_lib import ranks

    ranks.run(train, world_size=4, args=(config,), timeout=60)   # one result per rank

`run` tells the protocol between this process and its ranks, `rank` what one rank does, `report`
puts what went wrong in words. Importing this package loads no torch: the first run does, while
the process that forks the ranks is loading it too.
"""

from course_lib.errors import CourseError
from course_lib.ranks.crew import warm_up
from course_lib.ranks.report import RankDesync, RankError, RankInterrupt, RankTimeout
from course_lib.ranks.run import run

__all__ = [
    "RankDesync",
    "RankError",
    "RankInterrupt",
    "RankTimeout",
    "entries",
    "run",
    "warm_up",
]


def entries():
    """The collectives that this rank has issued so far, a tuple. To be called inside a rank."""
    from course_lib.ranks.recorder import Recorder  # loads torch

    if Recorder.current is None:
        raise CourseError("entries() was called outside a rank; call it in the function that runs")
    return Recorder.current.entries()
