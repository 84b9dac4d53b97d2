"""ranks.run in a kernel, where the function and its classes live in cells."""

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = {
    "define": """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from course_lib import ranks

class Box:
    def __init__(self, value):
        self.value = value

def fn(shift):
    print("hello")
    print("careful", file=sys.stderr)
    return Box(dist.get_rank() + shift)""",
    "run": """
boxes = ranks.run(fn, world_size=2, args=(1,))
print([box.value for box in boxes], all(isinstance(box, Box) for box in boxes))""",
    "raise": """
def broken():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()

ranks.run(broken)""",
    "wait": """
def lonely():
    if dist.get_rank() == 2:
        dist.barrier()

ranks.run(lonely, timeout=2)""",
    "interrupt": """
def endless():
    while True:
        pass

def interrupt():  # as Jupyter does it: the whole process group
    time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGINT)

threading.Thread(target=interrupt).start()
ranks.run(endless)""",
    "again": """
import psutil
left = [p for p in psutil.Process().children(recursive=True)
        if "forkserver" not in " ".join(p.cmdline())
        and "resource_tracker" not in " ".join(p.cmdline())]
print(left, ranks.run(dist.get_rank))""",
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, list]:
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, kernel_name="python3", timeout=120, allow_errors=True)
    client.coalesce_streams = True
    client.execute()
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def test_functions_and_classes_of_cells_work(outputs):
    (output,) = outputs["run"]
    assert output.text.splitlines() == [
        "rank 0 | hello",
        "rank 0 | careful",
        "rank 1 | hello",
        "rank 1 | careful",
        "[1, 2] True",
    ]


def test_an_error_names_cell_and_line_and_shows_no_traceback(outputs):
    (output,) = outputs["raise"]
    assert output.ename == "RankError"
    assert "\n".join(output.traceback) == (
        "RankError: rank 1 raised ValueError: on purpose\n"
        "  cell In[3], line 3, in broken\n"
        '    raise ValueError("on purpose")\n'
        "ranks 0, 2 and 3 were in barrier, cell In[3], line 4: dist.barrier()"
    )


def test_a_timeout_names_cell_and_line(outputs):
    (output,) = outputs["wait"]
    assert output.ename == "RankTimeout"
    assert "rank 2 was in barrier, cell In[4], line 3: dist.barrier()" in output.evalue
    assert "ranks 0, 1 and 3 had finished" in output.evalue


def test_an_interrupted_kernel_goes_on(outputs):
    (output,) = outputs["interrupt"]
    assert output.ename == "KeyboardInterrupt"
    (output,) = outputs["again"]
    assert output.text == "[] [0, 1, 2, 3]\n"


def test_nothing_is_written_to_stderr(outputs):
    streams = [o for cell in outputs.values() for o in cell if o.output_type == "stream"]
    assert {stream.name for stream in streams} == {"stdout"}
