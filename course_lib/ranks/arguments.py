"""What can be run: the arguments of `ranks.run`, checked before anything is started."""

import multiprocessing
import os
from collections.abc import Callable

from course_lib.errors import CourseError

MOST_RANKS = 64
MOST_SEED = 2**63
MOST_TIME = 86_400  # seconds


def torchrun_ranks() -> int | None:
    """How many ranks torchrun started, where this process is one of them."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def check(fn: Callable, world_size: int, args: tuple, timeout: float, seed: int | None) -> None:
    """CourseError for the first that is wrong."""
    if multiprocessing.current_process().name.startswith("rank "):
        problem = "ranks.run was called inside a rank; call it from outside the ranks"
    elif not callable(fn):
        problem = f"fn is {fn!r}, not a function; give the function, and its arguments in args"
    elif torchrun_ranks() not in (None, world_size):
        problem = (
            f"world_size is {world_size!r}, but torchrun started {torchrun_ranks()} ranks; start "
            f"it with --nproc-per-node={world_size}, or give world_size={torchrun_ranks()}"
        )
    elif not _whole(world_size) or not 1 <= world_size <= (torchrun_ranks() or MOST_RANKS):
        problem = (
            f"world_size is {world_size!r}; give a whole number from 1 to {MOST_RANKS}, as each "
            "rank is a process on this machine"
        )
    elif not isinstance(args, tuple):
        problem = f"args is a {type(args).__name__}, not a tuple; for one argument write args=(x,)"
    elif not isinstance(timeout, (int, float)) or not 0 < timeout <= MOST_TIME:
        problem = f"timeout is {timeout!r}; give seconds, more than 0 and at most {MOST_TIME}"
    elif seed is not None and not (_whole(seed) and 0 <= seed < MOST_SEED):
        problem = f"seed is {seed!r}; give a whole number from 0 to 2**63, or None to seed nothing"
    else:
        return
    raise CourseError(problem)


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
