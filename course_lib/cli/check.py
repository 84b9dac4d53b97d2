"""`course check`: run a learner's notebook from the first cell to the last, and show its checks.

The notebook is read, run in a fresh kernel in its own folder, and thrown away: the file on disk
stays as it is. Each check cell leaves its panel in words, and the same as plain data; both are
taken from there, so that the terminal and JupyterLab cannot disagree.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from course_lib.cli import workspace
from course_lib.errors import CourseError

CHECK_CALL = re.compile(r"\bcheck\(\s*[\"'](\d\d-[\w-]+)[\"']")


@dataclass(frozen=True)
class Checked:
    """What a run left of one exercise's check. `words` is its panel, or why there is none."""

    exercise: str
    points: int
    score: int
    words: str

    @property
    def passed(self) -> bool:
        return self.score == self.points


def check(
    lesson: Annotated[
        str, typer.Argument(help="A lesson's number, 01, or a notebook's path.", metavar="NN")
    ],
    timeout: Annotated[int, typer.Option(min=1, help="Seconds that a cell may run.")] = 300,
) -> None:
    """Run your notebook of a lesson; show scores and hints."""
    path = find_notebook(lesson)
    notebook = read_notebook(path)
    expected = exercises_in(notebook, path)
    typer.echo(f"Running {path.name} from top to bottom; this takes a minute or so.", err=True)
    troubles = run(notebook, path, timeout)
    results = collect(notebook, expected)
    for result in results:
        typer.echo(result.words)
    for trouble in troubles:
        typer.echo(trouble)
    score, points = sum(r.score for r in results), sum(r.points for r in results)
    typer.echo(f"{path.stem}: {score} of {points} points")
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


def find_notebook(name: str) -> Path:
    """The notebook that the learner means: a path, or a lesson's copy in work/."""
    path = Path(name)
    if path.is_file() or path.suffix == ".ipynb":
        return path
    root = workspace.find_root()
    path = root / "work" / workspace.find_lesson(root, name).notebook
    if not path.exists():
        raise CourseError(
            f"{path.relative_to(root)} is not there yet: `course lab` puts it there and opens it."
        )
    return path


def read_notebook(path: Path):
    """Read a notebook file. CourseError where it is missing or no notebook."""
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise CourseError(
            f"There is no notebook {path}: give a lesson's number, such as 01, or another path."
        ) from None
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:100]
        raise CourseError(
            f"{path} cannot be read as a notebook ({reason}): open it in JupyterLab and save it, "
            "or begin the lesson again with `course reset`."
        ) from error
    return notebook


def exercises_in(notebook, path: Path) -> list:
    """The exercises of the lesson that the notebook belongs to, known by its check cells."""
    from course_lib.checks import registry

    ids = {id for cell in _code(notebook) for id in CHECK_CALL.findall(cell.source)}
    known = {id[:2] for id in ids} & set(registry.lessons())
    lessons = [n for n in sorted(known) if ids & {e.id for e in registry.exercises(n)}]
    if not lessons:
        raise CourseError(
            f"{path} is not a notebook of the course: no cell in it checks one of the course's "
            "exercises; give a lesson's number, such as 01."
        )
    return [exercise for number in lessons for exercise in registry.exercises(number)]


def run(notebook, path: Path, timeout: int) -> list[str]:
    """Run all cells in place; say which cells failed that are not checks."""
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError
    from rich.console import Console

    for cell in _code(notebook):
        cell.outputs = []  # what was saved is no proof of what the cells do now
    cells = len(notebook.cells)
    with Console(stderr=True).status(f"{path.name}: starting a kernel") as status:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=timeout,
            allow_errors=True,
            interrupt_on_timeout=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(path.resolve().parent)}},
            on_cell_start=lambda cell, cell_index: status.update(
                f"{path.name}: cell {cell_index + 1} of {cells}"
            ),
        )
        stopped = []
        try:
            client.execute()
        except DeadKernelError:
            stopped = ["The kernel died, out of memory perhaps; the cells after it were not run."]
    return [_failure(cell, number, timeout) for number, cell in _failed(notebook)] + stopped


def collect(notebook, expected: list) -> list[Checked]:
    """One result for each exercise, in the lesson's order; the last run of a check counts."""
    from course_lib.checks.panel import MIME

    panels = {
        output.data[MIME]["exercise"]: output.data
        for cell in _code(notebook)
        for output in cell.outputs
        if MIME in output.get("data", {})
    }
    return [_checked(exercise, panels.get(exercise.id)) for exercise in expected]


def _checked(exercise, panel) -> Checked:
    from course_lib.checks.panel import MIME

    if panel is None:
        words = f"{exercise.id} · {exercise.title}: its check cell did not run"
        return Checked(exercise.id, exercise.total, 0, words)
    report = panel[MIME]
    return Checked(exercise.id, report["points"], report["score"], panel["text/plain"])


def _code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _failed(notebook) -> list:
    """The cells that raised and were not meant to, by their number in the notebook."""
    return [
        (number, cell)
        for number, cell in enumerate(notebook.cells, start=1)
        if cell.cell_type == "code"
        and "raises-exception" not in cell.metadata.get("tags", [])
        and any(output.output_type == "error" for output in cell.outputs)
    ]


def _failure(cell, number: int, timeout: int) -> str:
    error = next(output for output in cell.outputs if output.output_type == "error")
    if error.ename == "KeyboardInterrupt":
        return f"Cell {number} ran longer than {timeout} s and was interrupted."
    return f"Cell {number} raised {error.ename}: {error.evalue}".splitlines()[0]
