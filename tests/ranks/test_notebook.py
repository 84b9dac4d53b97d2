"""ranks.run in a kernel, where the function and its classes live in cells."""

import re

import nbformat
import pytest
from failing import FAILURES, PREAMBLE
from nbclient import NotebookClient

DEFINE = """
import sys
class Box:
    def __init__(self, value):
        self.value = value

def fn(shift):
    print("hello")
    print("careful", file=sys.stderr)
    return Box(dist.get_rank() + shift)
"""

LONG = """
def fn():
    print("early")
    time.sleep(3 + dist.get_rank() / 2)
    print("late", end="")
print("before")
ranks.run(fn, world_size=2)
"""

CELLS = {
    "preamble": PREAMBLE,
    "define": DEFINE,
    "run": """
boxes = ranks.run(fn, world_size=2, args=(1,))
print([box.value for box in boxes], all(isinstance(box, Box) for box in boxes))""",
    **{name: failure.source for name, failure in FAILURES.items()},
    "interrupt": """
def endless():
    time.sleep(600)

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
    "long": LONG,
}


class Client(NotebookClient):
    """Keeps the messages of the cell that runs."""

    def process_message(self, msg, cell, cell_index):
        self.messages.append(msg)
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope="module")
def executed() -> tuple[dict[str, list], list[dict]]:
    """What each cell gave; and all messages of the long run, once more, with someone looking on."""
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in (*CELLS.values(), LONG)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = Client(notebook, kernel_name="python3", timeout=120, allow_errors=True)
    client.coalesce_streams = True
    with client.setup_kernel():
        for index, cell in enumerate(cells):
            client.kc.allow_stdin = index == len(CELLS)
            client.messages = []
            client.execute_cell(cell, index)
    outputs = (cell.outputs for cell in cells[:-1])
    return dict(zip(CELLS, outputs, strict=True)), client.messages


@pytest.fixture(scope="module")
def outputs(executed) -> dict[str, list]:
    return executed[0]


def test_functions_and_classes_of_cells_work(outputs):
    (output,) = outputs["run"]
    assert output.text.splitlines() == [
        "rank 0 | hello",
        "rank 0 | careful",
        "rank 1 | hello",
        "rank 1 | careful",
        "[1, 2] True",
    ]


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_a_sentence_that_names_cell_and_line(outputs, name):
    failure = FAILURES[name]
    *streams, output = outputs[name]
    assert all(stream.name == "stdout" for stream in streams)  # gloo's last words
    assert output.ename == failure.error
    here = f"cell In[{list(CELLS).index(name) + 1}]"
    first, *others = failure.told
    told = [f"{failure.error}: {first}", *others]
    for line, start in zip("\n".join(output.traceback).splitlines(), told, strict=True):
        assert line.startswith(start.format(here=here))


def test_an_interrupt_is_told_in_a_few_lines_and_the_kernel_goes_on(outputs):
    (output,) = outputs["interrupt"]
    here = f"cell In[{list(CELLS).index('interrupt') + 1}]"
    assert "\n".join(output.traceback) == (
        "KeyboardInterrupt: the ranks were ended\n"
        f"  ranks 0-3 were at {here}, line 2: time.sleep(600)"
    )
    (output,) = outputs["again"]
    assert output.text == "[] [0, 1, 2, 3]\n"


def test_nothing_is_written_to_stderr(outputs):
    streams = [o for cell in outputs.values() for o in cell if o.output_type == "stream"]
    assert {stream.name for stream in streams} == {"stdout"}


PRINTS = [
    "before",
    "rank 0 | early",
    "rank 1 | early",
    "rank 0 | late",
    "rank 1 | late",
]


def test_a_long_run_leaves_its_prints_and_results_and_nothing_else(outputs):
    prints, result = outputs["long"]
    assert prints.text.splitlines() == PRINTS
    assert result.data == {"text/plain": "[None, None]"}


def test_a_long_run_shows_its_progress_to_who_looks_on_and_takes_it_away(executed):
    messages = [(message["msg_type"], message["content"]) for message in executed[1]]
    shown = [content for kind, content in messages if kind.endswith("display_data")]
    assert re.fullmatch(r"2 ranks, \d+ s of at most 60 s", shown[0]["data"]["text/plain"])
    assert shown[-1]["data"] == {} and len(shown) > 1
    assert len({content["transient"]["display_id"] for content in shown}) == 1
    assert "clear_output" not in dict(messages)
    streams = [content for kind, content in messages if kind == "stream"]
    assert "".join(stream["text"] for stream in streams).splitlines() == PRINTS
    assert {stream["name"] for stream in streams} == {"stdout"}
