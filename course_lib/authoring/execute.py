"""Run the solution notebook, and keep of its outputs what is the same next time.

Dropped: widgets that need a kernel (where HTML or a picture says the same), a check's report (its
cases are fresh each time), tracebacks (they name this machine's folders).
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import ipykernel.kernelspec
import nbclient
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from course_lib.authoring.lesson import Lesson
from course_lib.checks.panel import MIME as REPORT

WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURES = ("text/html", "image/png", "image/svg+xml")
CELL_TIMEOUT = 300  # seconds; a lesson's machine time is under a minute


class ThisPython(KernelSpecManager):
    """Every kernel is the Python that runs now, whatever kernels a user has installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        spec = ipykernel.kernelspec.get_kernel_dict()
        return KernelSpec(resource_dir=ipykernel.kernelspec.RESOURCES, **spec)


def execute(
    notebook: NotebookNode, lesson: Lesson, cwd: Path, progress: Callable[[str], None]
) -> None:
    """Run all cells in the folder `cwd`, in place. `progress` is told each cell's number.

    Raises CourseError with the cell and its error where one fails.
    """
    metadata, count = notebook.metadata.copy(), len(notebook.cells)
    begun = []

    def begin(cell: NotebookNode, cell_index: int) -> None:
        begun.append(cell)
        progress(f"cell {cell_index + 1} of {count}")

    client = nbclient.NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_spec_manager=ThisPython()),
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(cwd)}},
        timeout=CELL_TIMEOUT,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=begin,
    )
    try:
        asyncio.run(client.async_execute(cleanup_kc=True))
    except CellExecutionError as error:
        raise lesson.refuse(_failure(begun[-1], f"{error.ename}: {error.evalue}")) from None
    except CellTimeoutError:
        raise lesson.refuse(_failure(begun[-1], f"no end after {CELL_TIMEOUT} s")) from None
    except DeadKernelError:
        raise lesson.refuse(_failure(begun[-1], "the death of its kernel")) from None
    notebook.metadata = metadata
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            _normalise(output)


def _failure(cell: NotebookNode, error: str) -> str:
    """The cell that failed, with its first lines."""
    lines = cell.source.splitlines()
    shown = lines if len(lines) <= 12 else [*lines[:11], "…"]
    return "\n    ".join([f"cell {cell.id} failed with {error}, in", *shown])


def _normalise(output: NotebookNode) -> None:
    if output.output_type == "error":
        output.traceback = [f"{output.ename}: {output.evalue}"]
    data = output.get("data", {})
    data.pop(REPORT, None)
    if any(picture in data for picture in PICTURES):
        data.pop(WIDGET, None)
