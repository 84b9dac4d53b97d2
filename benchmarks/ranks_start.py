"""How long four fresh ranks take to start, all-reduce one number and end.

    python benchmarks/ranks_start.py

Times `ranks.run` in this process (the first call, then the median of 20) beside
`python -m torch.distributed.run` on the same function, each run a new launcher as it is in a
terminal. The figures are of this machine; the ratios travel better.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from course_lib import ranks

WORLD_SIZE = 4
RUNS = 20
LAUNCHER_RUNS = 3


def all_reduce_one() -> float:
    """The number of ranks, as they count themselves."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


def under_torchrun() -> None:
    """What each rank of the launcher runs: this file, with an argument."""
    dist.init_process_group("gloo")
    all_reduce_one()
    dist.destroy_process_group()


def launch() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={WORLD_SIZE}", __file__, "rank"]
    subprocess.run(command, check=True, capture_output=True)


def run() -> None:
    if ranks.run(all_reduce_one, world_size=WORLD_SIZE) != [WORLD_SIZE] * WORLD_SIZE:
        raise RuntimeError("the ranks did not count themselves right")


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    first = seconds(run)
    later = [seconds(run) for _ in range(RUNS)]
    launched = [seconds(launch) for _ in range(LAUNCHER_RUNS)]
    median, launcher = statistics.median(later), statistics.median(launched)
    print(f"{WORLD_SIZE} ranks, torch {torch.__version__}")
    print(f"ranks.run, first call            {first:7.2f} s   {first / median:6.1f} x")
    print(f"ranks.run, median of {RUNS} more     {median:7.2f} s      1.0 x", end="")
    print(f"   ({min(later):.2f} to {max(later):.2f} s)")
    print(f"torchrun, median of {LAUNCHER_RUNS}            {launcher:7.2f} s   ", end="")
    print(f"{launcher / median:6.1f} x   ({min(launched):.2f} to {max(launched):.2f} s)")


if __name__ == "__main__":
    under_torchrun() if "rank" in sys.argv[1:] else main()
