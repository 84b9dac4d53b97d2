"""Run an answer on real ranks, each of which is given its own data and none of the others'.

So an answer that needs what another rank holds has to communicate: no arithmetic on its own
arguments gives the right result.
"""

import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.checks.answering import watch, watched
from course_lib.checks.exercise import Answer, Case

TIMEOUT = 20.0


def on_ranks(answer: Answer, case: Case) -> dict[str, object]:
    """`case.args` is (inputs,), one list of arguments for each rank; numbers arrive as tensors.

    Gives what the answer returned on each rank: {"rank 0": …, "rank 1": …}.
    """
    (inputs,) = case.args
    off_limits, called = watched()
    args = answer, inputs, off_limits
    results = ranks.run(_own, world_size=len(inputs), args=args, timeout=TIMEOUT)
    called += [name for _, names in results for name in names]
    return {f"rank {rank}": result for rank, (result, _) in enumerate(results)}


def _own(answer: Answer, inputs: list[list], off_limits: frozenset[str]) -> tuple:
    """What the answer returns on this rank, and which names that are off limits it called."""
    mine = [_tensor(value) for value in inputs[dist.get_rank()]]
    with watch(off_limits) as called:
        return answer(*mine), called[:1]


def _tensor(value: object) -> object:
    return torch.tensor(value) if isinstance(value, (float, list)) else value
