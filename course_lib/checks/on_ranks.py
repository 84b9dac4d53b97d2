"""Run an answer on real ranks, each of which is given its own data and none of the others'.

So an answer that needs what another rank holds has to communicate: no arithmetic on its own
arguments gives the right result.
"""

import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.checks.exercise import Answer, Case

TIMEOUT = 20.0


def on_ranks(answer: Answer, case: Case) -> dict[str, object]:
    """`case.args` is (inputs,), one list of arguments for each rank; numbers arrive as tensors.

    Gives what the answer returned on each rank: {"rank 0": …, "rank 1": …}.
    """
    return {f"rank {rank}": result for rank, result in enumerate(_run(answer, case))}


def on_ranks_with_log(answer: Answer, case: Case) -> dict[str, object]:
    """As `on_ranks`, and what each rank communicated to get there: how often, how many bytes.

    So the right numbers are not enough: they must have travelled as they should. Gives
    {"rank 0": {"returned": …, "calls": {"send": 3}, "bytes": {"send": 120}}, …}.
    """
    results = _run(answer, case)
    return {
        f"rank {rank}": {
            "returned": result,
            "calls": results.log.counts(rank),
            "bytes": results.log.bytes(rank),
        }
        for rank, result in enumerate(results)
    }


def _run(answer: Answer, case: Case) -> list:
    (inputs,) = case.args
    try:
        return ranks.run(_own, world_size=len(inputs), args=(answer, inputs), timeout=TIMEOUT)
    except ranks.RankError as error:
        if isinstance(error.__cause__, NotImplementedError):
            raise NotImplementedError(str(error)) from error
        raise


def _own(answer: Answer, inputs: list[list]) -> object:
    mine = [_tensor(value) for value in inputs[dist.get_rank()]]
    return answer(*mine)


def _tensor(value: object) -> object:
    return torch.tensor(value) if isinstance(value, (float, list)) else value
