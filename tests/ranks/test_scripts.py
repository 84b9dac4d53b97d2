"""ranks.run where `__main__` is a script: it is not run again, and nothing outlives it."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

LIMIT = 120  # seconds; a first run loads torch twice

SCRIPT = """
import torch.distributed as dist
from course_lib import ranks

print("the script runs")

class Box:
    def __init__(self, value):
        self.value = value

def fn():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    return Box(dist.get_rank())

(box,) = ranks.run(fn, world_size=1)
print(isinstance(box, Box), box.value)
ranks.run(fn, world_size=2)
"""

SLEEPERS = """
import os, sys, time
from pathlib import Path
from course_lib import ranks

def fn(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)

ranks.run(fn, args=(sys.argv[1],))
"""


def python(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=LIMIT, **options
    )


@pytest.mark.parametrize(
    ("road", "start"),
    [("file", ""), ("stdin", ""), ("stdin", "spawn")],  # stdin: __main__ has no file, as a kernel's
)
def test_a_script_needs_no_guard(road, start, tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RANKS_START", start)
    script = tmp_path / "learner.py"
    script.write_text(SCRIPT)
    done = python(str(script)) if road == "file" else python("-", input=SCRIPT)
    assert done.stdout == "the script runs\nTrue 0\n"
    assert done.returncode == 1
    assert "RankError: rank 1 raised ValueError: on purpose\n" in done.stderr
    if road == "file":
        assert 'learner.py, line 13, in fn\n    raise ValueError("on purpose")' in done.stderr
    assert done.stderr.startswith("ValueError: on purpose\n\nThe above exception was the direct")


def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS, str(tmp_path)], stderr=subprocess.DEVNULL
    )
    try:
        while len(list(tmp_path.iterdir())) < 4:
            assert parent.poll() is None
        started = psutil.Process(parent.pid).children(recursive=True)
        assert {int(Path(path).name) for path in tmp_path.iterdir()} <= {p.pid for p in started}
    finally:
        parent.kill()
        parent.wait()
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left


def test_importing_ranks_loads_no_torch():
    done = python("-c", "import sys, course_lib.ranks; print('torch' in sys.modules)")
    assert done.stdout == "False\n"
