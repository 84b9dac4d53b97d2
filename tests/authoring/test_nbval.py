"""nbval with the course's conftest.py: what passes, and what must not.

All notebooks of a folder are run in one go, the toy lesson's own and altered copies beside it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def course(built):
    """The toy course with the repository's conftest.py and what it reads."""
    shutil.copy(ROOT / "conftest.py", built.root)
    (built.root / "pytest.ini").touch()
    (built.root / "tests" / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "tests/notebooks/sanitize.cfg", built.root / "tests" / "notebooks")
    return built


def copy(path, name, change):
    """Put an altered copy beside a notebook; `change` gets its cells by their ids."""
    notebook = nbformat.read(path, as_version=4)
    change({cell.id: cell for cell in notebook.cells}, notebook.cells[-1])
    nbformat.write(notebook, path.with_name(f"{name}.ipynb"))


def failures(course, *arguments):
    """Run pytest with nbval there. Returns the failed cells, (notebook, number), and the text."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--color=no", "--nbval-current-env", *arguments],
        cwd=course.root,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    names = [line.removeprefix("FAILED ").split(" - ")[0].split("::") for line in lines]
    return {(Path(path).stem, int(cell.split()[1])) for path, cell in names}, done.stdout


def test_an_unsolved_notebook_passes_exactly_when_every_check_fails(course):
    def solve(cells, last):
        cells["01-half"].source = "half = lambda n: n / 2"

    def use(cells, last):
        last.source = "print(double(1))"

    copy(course.learner, "solved", solve)
    copy(course.learner, "uses_the_stub", use)
    failed, output = failures(course, "--nbval-lax", "notebooks")
    assert failed == {("solved", 5), ("uses_the_stub", 6)}, output
    assert "has the tag raises-exception, but raised nothing" in output


def test_stored_outputs_are_compared_where_they_can_be(course):
    html = "<img src='data:image/svg+xml;base64,{}'>"
    report = {"application/vnd.course.report+json": {"seed": 1}, "text/plain": "passed"}

    def other(cells, last):
        last.outputs[0].text = "something else\n"

    def masked(cells, last):
        new = nbformat.v4.new_output
        shown = [report, {"text/html": html.format("QUJD")}]
        stored = [{"text/plain": "passed"}, {"text/html": html.format("REVG")}]
        last.source = f"for each in {shown}:\n    display(each, raw=True)\nobject()"
        last.outputs = [new("display_data", data) for data in stored]
        last.outputs.append(new("execute_result", {"text/plain": "<object at 0x7f0000000000>"}))

    copy(course.solution, "other", other)
    copy(course.solution, "masked", masked)
    failed, output = failures(course, "--nbval", "solutions")
    assert failed == {("other", 6)}, output
