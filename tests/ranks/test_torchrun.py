"""ranks.run in a script that torchrun started: the same calls, on the ranks that are there."""

import subprocess
import sys

LIMIT = 240  # seconds; each rank loads torch

# A print is one write, at once: torchrun ends the other ranks, and all share one pipe.
SCRIPT = """
import os, torch, torch.distributed as dist; from course_lib import ranks
print = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def fn(shift):
    x = torch.full((3,), dist.get_rank() + shift)
    dist.all_reduce(x)
    return x, float(torch.rand(()))

def disagrees():
    x = torch.ones(4)
    dist.all_reduce(x.int() if dist.get_rank() else x)

def raises():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()

for shift in (1.0, 2.0):
    results = ranks.run(fn, world_size=2, args=(shift,))
    if dist.get_rank() == 1:
        (x, draw), (_, other) = results
        (entry,) = results.log[0]
        print("results", x.tolist(), draw != other, entry.kind, entry.seq, entry.site)

for call in (
    lambda: ranks.run(fn, world_size=4, args=(1.0,)),
    lambda: ranks.run(lambda: ranks.run(fn, world_size=2), world_size=2),
    lambda: ranks.run(disagrees, world_size=2),
):
    try:
        call()
    except (ValueError, ranks.RankError) as error:
        print(f"refused: {str(error).splitlines()[0]}")

ranks.run(raises, world_size=2)
"""

EXPECTED = [
    "refused: rank 0 called all_reduce #1 with 4 float32 while rank 1 called all_reduce #1 with "
    "4 int32",
    "refused: rank 0 raised CourseError: ranks.run was called inside a rank; call it from outside "
    "the ranks",
    "refused: rank 1 raised CourseError: ranks.run was called inside a rank; call it from outside "
    "the ranks",
    "refused: world_size is 4, but torchrun started 2 ranks; start it with --nproc-per-node=4, or "
    "give world_size=2",
    "results [3.0, 3.0, 3.0] True all_reduce 1 train.py, line 7",
    "results [5.0, 5.0, 5.0] True all_reduce 1 train.py, line 7",
]


def test_the_same_calls_run_on_the_ranks_that_are_there(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert sorted(set(done.stdout.splitlines())) == EXPECTED, done.stderr
    assert done.returncode != 0
    assert "RankError: rank 1 raised ValueError: on purpose\n" in done.stderr
