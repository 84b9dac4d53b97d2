"""How long 10,000 ledgers take, and the peaks of a sweep.

    python benchmarks/ledgers.py

Ledgers of model states: every preset × stage × ranks. Peaks: Llama 3 8B over stages, ranks, and
sequences, each job new; and over ranks alone, where the work of a micro-batch is remembered.
"""

import time
from itertools import cycle, islice, product

from course_lib import ledger, specs

MANY, SOME = 10_000, 300
MODELS = [name for name in specs.models() if not specs.model(name).is_bare]
STAGES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
LLAMA = specs.model("llama3-8b")


def states(model: str, stage: str, gpus: int) -> None:
    ledger.model_states(specs.model(model), specs.Recipe(), specs.Strategy(stage, gpus))


def peak(seq_len: int, stage: str, gpus: int) -> None:
    ledger.peak(LLAMA, specs.Recipe(seq_len=seq_len), specs.Strategy(stage, gpus))


def measure(what: str, function, jobs, count: int) -> None:
    jobs = list(islice(cycle(jobs), count))
    start = time.process_time()
    for job in jobs:
        function(*job)
    each = (time.process_time() - start) / count
    print(f"{what:42}{1e3 * each:8.3f} ms each, 10,000 in {MANY * each:6.1f} s")


def main() -> None:
    ranks = [2**n for n in range(1, 11)]
    measure("model states", states, product(MODELS, STAGES, ranks), MANY)
    sequences = range(512, 8192, 64)
    measure("peaks, every job new", peak, product(sequences, STAGES, ranks[::3]), SOME)
    measure("peaks over ranks", peak, product([4096], STAGES, range(2, 1000)), SOME)


if __name__ == "__main__":
    main()
