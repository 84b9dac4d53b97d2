"""How long four ranks take to start, all-reduce one number and end, run in four ways.

    python benchmarks/ranks_start.py

ranks.run      in this process: the first call, then the median of 20, each with fresh ranks
in a kernel    the same, in a cell of a Jupyter kernel
torchrun       `python -m torch.distributed.run`, each run a new launcher as it is in a terminal
ipyparallel    a cluster of four engines: from its start to the first result, then later calls on
               the same engines, which keep their process group and all state of the calls before

All in one go on one machine, so that the ratios travel, which the seconds do not.
"""

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import torch
import torch.distributed as dist
from nbclient import NotebookClient

from course_lib import ranks

WORLD_SIZE = 4
RUNS = 20
LAUNCHER_RUNS = 3
KERNEL = """
import runpy
runpy.run_path({path!r})["time_ranks_run"]()
"""


def all_reduce_one() -> float:
    """The number of ranks, as they count themselves."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


def run() -> None:
    counted(ranks.run(all_reduce_one, world_size=WORLD_SIZE))


def counted(results: list) -> None:
    if list(results) != [WORLD_SIZE] * WORLD_SIZE:
        raise RuntimeError("the ranks did not count themselves right")


def time_ranks_run() -> None:
    """Print seconds: the first call, then each of RUNS more."""
    print(*(seconds(run) for _ in range(1 + RUNS)))


def in_a_kernel() -> list[float]:
    cell = nbformat.v4.new_code_cell(KERNEL.format(path=__file__))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, kernel_name="python3", timeout=600).execute()
    return [float(word) for word in notebook.cells[0].outputs[0].text.split()]


def under_torchrun() -> None:
    """What each rank of the launcher runs: this file, with an argument."""
    dist.init_process_group("gloo")
    all_reduce_one()
    dist.destroy_process_group()


def launch() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={WORLD_SIZE}", __file__, "rank"]
    subprocess.run(command, check=True, capture_output=True)


def engine(rank: int, world_size: int, rendezvous: str) -> float:
    """What each engine runs; it joins a process group at its first call."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.FileStore(rendezvous, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


def on_engines() -> tuple[float, list[float]]:
    """Seconds to the first result of a new cluster, and of each of RUNS more calls."""
    import ipyparallel

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with ipyparallel.Cluster(n=WORLD_SIZE, log_level=40) as client:
            each, size = range(WORLD_SIZE), [WORLD_SIZE] * WORLD_SIZE
            meeting = [str(Path(folder, "rendezvous"))] * WORLD_SIZE

            def call() -> None:
                counted(client[:].map_sync(engine, each, size, meeting))

            call()
            first = time.perf_counter() - start
            return first, [seconds(call) for _ in range(RUNS)]


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    first, *later = [seconds(run) for _ in range(1 + RUNS)]
    kernel_first, *kernel = in_a_kernel()
    launched = [seconds(launch) for _ in range(LAUNCHER_RUNS)]
    unit = statistics.median(later)
    print(f"{WORLD_SIZE} ranks, torch {torch.__version__}")
    rows = [
        ("ranks.run, first call", [first]),
        (f"ranks.run, median of {RUNS} more", later),
        ("ranks.run in a kernel, first call", [kernel_first]),
        (f"ranks.run in a kernel, median of {RUNS} more", kernel),
        (f"torchrun, median of {LAUNCHER_RUNS}", launched),
    ]
    if importlib.util.find_spec("ipyparallel"):
        engines_first, engines = on_engines()
        rows += [
            ("ipyparallel, cluster and first call", [engines_first]),
            (f"ipyparallel, same engines, median of {RUNS} more", engines),
        ]
    else:
        print("without ipyparallel, which .venv/bin/python -m pip install -e '.[peers]' brings")
    for name, times in rows:
        median = statistics.median(times)
        spread = f"   ({min(times):.2f} to {max(times):.2f} s)" if len(times) > 1 else ""
        print(f"{name:<50}{median:7.2f} s {median / unit:7.1f} x{spread}")


if __name__ == "__main__":
    under_torchrun() if "rank" in sys.argv[1:] else main()
