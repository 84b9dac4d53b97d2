"""Does alpha-beta, fitted on six sizes, predict the time of the sizes it was not shown?

    python benchmarks/alpha_beta.py [rounds]

Four gloo ranks all-reduce buffers of twelve sizes. Alpha and beta are fitted on six of them, and
predict the other six, 1 to 48 MiB. How it is measured decides whether that can hold:

- Each round takes every size once, so that a busy moment of the machine falls on all sizes alike,
  and so that no buffer is still in a cache when its turn comes again.
- A collective has taken as long as its slowest rank; a size has the median over the rounds. (The
  minimum is luck, and more of it for the small ones: beside other work, with fewer cores than
  ranks, no large one ever runs undisturbed.)
- The sizes to fit span those to predict, and the fit weighs relative errors.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist

from course_lib import comm, ranks
from course_lib.specs import Collective

WORLD_SIZE = 4
ROUNDS = 40
MIB = 2**20
FITTED = [MIB // 2, 2 * MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB]
HELD_OUT = [MIB, 3 * MIB, 6 * MIB, 12 * MIB, 24 * MIB, 48 * MIB]
ITEMSIZE = 4


def time_all(sizes: list[int], rounds: int) -> dict[int, list[float]]:
    """What each rank runs: the seconds of every round, for each size in bytes."""
    buffers = {size: torch.zeros(size // ITEMSIZE) for size in sizes}
    seconds = {size: [] for size in sizes}
    for _ in range(1 + rounds):
        for size, buffer in buffers.items():
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            seconds[size].append(time.perf_counter() - start)
    return {size: times[1:] for size, times in seconds.items()}  # the first round warms up


def measure(sizes: list[int], rounds: int) -> dict[int, float]:
    """Seconds of an all_reduce of each size: the slowest rank's, the median over the rounds."""
    each = ranks.run(time_all, WORLD_SIZE, args=(sizes, rounds), timeout=3600)
    return {
        size: statistics.median(map(max, zip(*(rank[size] for rank in each), strict=True)))
        for size in sizes
    }


def all_reduce(size: int) -> Collective:
    return Collective("all_reduce", size // ITEMSIZE, ITEMSIZE, WORLD_SIZE)


def main(rounds: int) -> None:
    measured = measure(sorted(FITTED + HELD_OUT), rounds)
    fitted = comm.fit((all_reduce(size), measured[size]) for size in FITTED)
    print(f"all_reduce on {WORLD_SIZE} gloo ranks, torch {torch.__version__}, {rounds} rounds")
    print(f"alpha {fitted.alpha * 1e6:,.0f} µs, bandwidth {fitted.bandwidth / 1e9:.2f} GB/s")
    print("      MiB   measured ms  predicted ms    error")
    errors = {}
    for size in sorted(measured):
        predicted = fitted.seconds(all_reduce(size))
        errors[size] = predicted / measured[size] - 1
        told = "fitted" if size in FITTED else "held out"
        print(
            f"{size / MIB:9.1f} {measured[size] * 1e3:13.2f} {predicted * 1e3:13.2f} "
            f"{errors[size]:+8.1%}  {told}"
        )
    off = [abs(errors[size]) for size in HELD_OUT]
    print(f"held out: median error {statistics.median(off):.1%}, largest {max(off):.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
