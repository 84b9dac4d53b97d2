"""Ctrl-C more than once: the ranks and what they started are gone all the same."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil

SCRIPT = """
import subprocess, time
import torch.distributed as dist
from course_lib import ranks

def fn():
    child = subprocess.Popen(["sleep", "985"])
    print("up", child.pid, flush=True)
    if dist.get_rank() == 1:
        sum(range(10**12))  # never gives way to another thread
    time.sleep(100)

ranks.run(fn, world_size=2)
"""


def test_two_interrupts_leave_nothing(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    ups = [process.stdout.readline() for _ in range(2)]
    children = [int(line.split()[-1]) for line in ups]
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=30)
    alive = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert alive == [] and not any(map(_runs, children))


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
