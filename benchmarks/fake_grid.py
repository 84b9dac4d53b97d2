"""The ledger's peak of large jobs beside that of rank 0 of many, run with fake tensors.

    python benchmarks/fake_grid.py         all of it, some minutes; or the ranks: 64

Fake tensors have shapes and no memory, and a fake process group answers at once: so a rank of a
70B model on 1,024 GPUs runs here, in this course's FSDP, and `LiveBytes`' rules follow what it
holds. See measure.fake_run, which also says how blocks that are alike are left out.
"""

import statistics
import sys
from itertools import product

from course_lib import ledger, specs
from course_lib.measure.fake_run import fake_peak

# As the course's Llama runs on a CPU, without what gloo copies.
KERNELS = ledger.CPU
LAYERS = 6, 8
MODELS = ("llama2-7b", "llama3-8b", "llama3-70b")


def main(*chosen: str) -> None:
    errors = []
    for gpus in map(int, chosen or ("8", "64", "256", "1024")):
        for name, precision, checkpointing, wrap in product(
            MODELS, ("fsdp-bf16", "pure-bf16"), ("none", "full"), ("layer", "model")
        ):
            job = (
                specs.model(name),
                specs.Recipe(precision, seq_len=2048, checkpointing=checkpointing),
                specs.Strategy("fsdp", gpus, wrap=wrap),
            )
            real = fake_peak(*job, layers=LAYERS).bytes
            predicted = ledger.peak(*job, KERNELS, copies=False).bytes
            errors.append(abs(predicted / real - 1))
            told = f"{name},{gpus},{precision},{checkpointing},{wrap},{real}"
            print(f"{told},{predicted},{predicted / real - 1:+.3%}", flush=True)
    print(f"{len(errors)} jobs: median {statistics.median(errors):.3%}, worst {max(errors):.3%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
