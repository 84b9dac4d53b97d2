"""What the forkserver loads once, so that the ranks it forks find it loaded.

`torch._dynamo` is here because the first optimizer a process makes imports it, and
`torch.distributed.fsdp` because `fully_shard` does: seconds for each rank of each run otherwise.
The forkserver itself says nothing: a warning of an import would appear in the notebook as an
error of the cell that happened to run.
"""

import atexit
import gc
import importlib
import os
import sys

MODULES = (
    "numpy",
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "course_lib.ranks.rank",
)

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    # One thread, or the forkserver would fork beside the threads of numpy's linear algebra.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    atexit.register(os._exit, 0)  # the orderly end of an interpreter this full takes seconds

for name in MODULES:
    importlib.import_module(name)
gc.freeze()  # the collector of a rank need not walk (and so copy) what all ranks share
