"""Ways for a run to go wrong, each as a cell would have it, and what the learner reads then.

The same sources run as scripts (test_rank_failures) and in a kernel (test_notebook). `{here}`
stands for the file or cell. Deadlines are far off, but for `loop`: nothing else waits for one.
"""

from dataclasses import dataclass

PREAMBLE = """\
import os, resource, signal, threading, time
import torch
import torch.distributed as dist
from course_lib import ranks
"""


@dataclass(frozen=True)
class Failure:
    source: str
    error: str
    told: tuple[str, ...]  # lines of the message, or their beginnings


def body(lines: str, timeout: int = 600) -> str:
    """A cell: `lines`, from line 4 on, on 4 ranks, after one all_reduce of 4 numbers by all."""
    code = "\n".join("    " + line for line in lines.splitlines())
    return f"""\
def fn():
    rank, x = dist.get_rank(), torch.ones(4)
    dist.all_reduce(x)
{code}

ranks.run(fn, timeout={timeout})
"""


FAILURES = {
    "raises": Failure(
        body('if rank == 1:\n    raise ValueError("no data")\ndist.all_reduce(x)'),
        "RankError",
        (
            "rank 1 raised ValueError: no data",
            "  {here}, line 5, in fn",
            '    raise ValueError("no data")',
            "ranks 0, 2 and 3 were in all_reduce #2 (16 bytes), {here}, line 6: dist.all_reduce(x)",
        ),
    ),
    "another collective": Failure(
        body("if rank == 2:\n    dist.broadcast(x, src=0)\nelse:\n    dist.all_reduce(x)"),
        "RankDesync",
        (
            "rank 2 called broadcast #2 from rank 0 while ranks 0, 1 and 3 called all_reduce #2",
            "  ranks 0, 1 and 3  all_reduce #2             4 float32, 16 bytes  {here}, line 7: ",
            "  rank 2            broadcast #2 from rank 0  4 float32, 16 bytes  {here}, line 5: ",
        ),
    ),
    "another shape": Failure(
        body("y = torch.ones(5 if rank == 0 else 6)\ndist.all_reduce(y)"),
        "RankDesync",
        (
            "rank 0 called all_reduce #2 with 5 float32 while ranks 1-3 called all_reduce #2 with "
            "6 float32",
            "  rank 0     all_reduce #2  5 float32, 20 bytes  {here}, line 5: dist.all_reduce(y)",
            "  ranks 1-3  all_reduce #2  6 float32, 24 bytes  {here}, line 5: dist.all_reduce(y)",
        ),
    ),
    "another dtype": Failure(  # of the same size: gloo returns wrong numbers
        body("dist.all_reduce(x if rank else x.int())"),
        "RankDesync",
        (
            "rank 0 called all_reduce #2 with 4 int32 while ranks 1-3 called all_reduce #2 with "
            "4 float32",
            "  rank 0     all_reduce #2  4 int32, 16 bytes    {here}, line 4: ",
            "  ranks 1-3  all_reduce #2  4 float32, 16 bytes  {here}, line 4: ",
            "all ranks returned, but what they got cannot be trusted",
        ),
    ),
    "skips one": Failure(
        body("if rank != 3:\n    dist.all_reduce(x)\ndist.barrier()"),
        "RankDesync",
        (
            "rank 3 called barrier #2 while ranks 0-2 called all_reduce #2",
            "  ranks 0-2  all_reduce #2  4 float32, 16 bytes  {here}, line 5: dist.all_reduce(x)",
            "  rank 3     barrier #2                          {here}, line 6: dist.barrier()",
        ),
    ),
    "returns early": Failure(
        body("if rank == 2:\n    return\ndist.all_reduce(x)"),
        "RankDesync",
        (
            "rank 2 returned without calling all_reduce #2, which ranks 0, 1 and 3 wait for",
            "  ranks 0, 1 and 3  all_reduce #2                 4 float32, 16 bytes  {here}, line 6",
            "  rank 2            returned after all_reduce #1  4 float32, 16 bytes  {here}, line 3",
        ),
    ),
    "sends first": Failure(
        body("dist.send(x, (rank + 1) % 4)\ndist.recv(x, (rank - 1) % 4)"),
        "RankDesync",
        (
            "ranks 0-3 wait for each other, and none of them can go on",
            *(
                f"  rank {r}  send #1 to rank {(r + 1) % 4}  4 float32, 16 bytes  "
                f"waiting for rank {(r + 1) % 4}  {{here}}, line 4: "
                for r in range(4)
            ),
            "  a send ends once its recv is called",
        ),
    ),
    "dies": Failure(
        body("if rank == 1:\n    os._exit(3)\ndist.all_reduce(x)"),
        "RankError",
        (
            "rank 1 died before returning: exit code 3, after all_reduce #1 (16 bytes), {here}, "
            "line 3",
            "ranks 0, 2 and 3 were in all_reduce #2 (16 bytes), {here}, line 6: dist.all_reduce(x)",
        ),
    ),
    "is killed for its memory": Failure(
        body("if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)"),
        "RankError",
        (
            "rank 1 died before returning: signal SIGKILL (often: out of memory), after",
            "ranks 0, 2 and 3 were in all_reduce #2 (16 bytes), {here}, line 6: dist.all_reduce(x)",
        ),
    ),
    "gets no memory": Failure(
        body(
            "if rank == 1:\n"
            "    pages = int(open('/proc/self/statm').read().split()[0])\n"
            "    limit = pages * resource.getpagesize() + 2**30\n"
            "    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
            "    x = torch.ones(2**30)\n"
            "dist.all_reduce(x)"
        ),
        "RankError",
        (
            "rank 1 raised RuntimeError: ",
            "  {here}, line 8, in fn",
            "    x = torch.ones(2**30)",
            "ranks 0, 2 and 3 were in all_reduce #2 (16 bytes), {here}, line 9: dist.all_reduce(x)",
        ),
    ),
    "loops": Failure(
        body("while rank == 1:\n    pass\ndist.all_reduce(x)", timeout=3),
        "RankTimeout",
        (
            "the ranks were ended because they had not finished within 3 s",
            "  ranks 0, 2 and 3 were in all_reduce #2 (16 bytes), {here}, line 6: ",
            "  rank 1 was at {here}, line ",
        ),
    ),
}
