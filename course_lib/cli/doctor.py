"""`course doctor`: is this machine ready for the course, line by line.

Each line says what was found and, where something must be done, what. The same report draws
itself in a notebook: `from course_lib.cli.doctor import examine`.
"""

import html
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import typer

from course_lib.cli import workspace
from course_lib.errors import CourseError

PYTHON = (3, 11)
SHOWN = ("torch", "jupyterlab", "ipykernel", "ipywidgets", "nbgrader")  # each on its own line
MIN_CORES, MIN_MEMORY_GIB, MIN_DISK_GIB = 2, 4, 1
RANKS = 4


@dataclass(frozen=True)
class Row:
    """One thing that was looked at. `todo` is empty when all is well."""

    what: str
    found: str
    todo: str = ""

    @property
    def ok(self) -> bool:
        return not self.todo


@dataclass(frozen=True)
class Report:
    """All that was looked at. It draws itself in a notebook and prints as text."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def verdict(self) -> str:
        if self.ok:
            return "This machine is ready for the course."
        todo = sum(not row.ok for row in self.rows)
        return f"{todo} of {len(self.rows)} lines say what to do."

    def __str__(self) -> str:
        width = max((len(row.what) for row in self.rows), default=0)
        lines = [f"{row.what:<{width}}  {_status(row)}  {row.found}" for row in self.rows]
        lines = [
            line if row.ok else f"{line}\n{'':<{width}}         {row.todo}"
            for line, row in zip(lines, self.rows, strict=True)
        ]
        return "\n".join([*lines, self.verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names = ("", "", "found") if self.ok else ("", "", "found", "what to do")
        rows = ((row.what, _status(row), row.found, row.todo)[: len(names)] for row in self.rows)
        lines = (_html_line("td", row) for row in rows)
        table = f"<table>{_html_line('th', names)}{''.join(lines)}</table>"
        return f"{table}<p>{html.escape(self.verdict)}</p>"


def doctor() -> None:
    """Say whether this machine is ready, and what to do if not."""
    report = examine()
    typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


def examine(root: Path | None = None) -> Report:
    """Look at this machine: a few seconds, most of them for torch and the ranks."""
    root = root or workspace.find_root()
    looks: tuple[tuple[str, Callable[[], Row | Iterable[Row]]], ...] = (
        ("Python", python),
        ("packages", lambda: packages(_pins(root))),
        ("cores", cores),
        ("memory", memory),
        ("disk", lambda: disk(root)),
        ("write access", lambda: write_access(root)),
        ("GPU", gpu),
        ("kernel", kernel),
        ("widgets", widgets),
        ("ranks", ranks),
    )
    return Report(tuple(row for what, look in looks for row in _look(what, look)))


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Row:
    found = ".".join(map(str, version))
    if version >= PYTHON:
        return Row("Python", found)
    return Row("Python", found, "Install Python 3.11 or newer and run `make lab PYTHON=…` again.")


def packages(pins: dict[str, str]) -> list[Row]:
    """The course's direct dependencies against the lock: {name: version}."""
    from importlib.metadata import PackageNotFoundError, version

    rows = []
    for name in _direct():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        wanted = pins.get(name, "any version")
        same = found.split("+")[0] == wanted or (wanted == "any version" and found[0].isdigit())
        rows.append(Row(name, found, "" if same else f"{wanted} is pinned: {_AGAIN}"))
    shown = [row for row in rows if row.what in SHOWN or not row.ok]
    others = len(rows) - len(shown)
    return [*shown, Row("other packages", f"{others} as pinned")]


def cores(count: int | None = None) -> Row:
    if count is None:
        usable = getattr(os, "sched_getaffinity", None)
        count = len(usable(0)) if usable else os.cpu_count() or 1
    todo = f"Expect waiting: the labs are paced for {MIN_CORES} cores." if count < MIN_CORES else ""
    return Row("cores", str(count), todo)


def memory(free: int | None = None) -> Row:
    """`free`: bytes that a new process could have."""
    if free is None:
        import psutil

        free = psutil.virtual_memory().available
    todo = f"Close other programs: the labs need up to {MIN_MEMORY_GIB} GiB."
    return Row("memory", f"{_gib(free)} free", todo if free < MIN_MEMORY_GIB * 2**30 else "")


def disk(root: Path, free: int | None = None) -> Row:
    if free is None:
        import psutil

        free = psutil.disk_usage(str(root)).free
    todo = f"Free some: checkpoints and traces need {MIN_DISK_GIB} GiB."
    return Row("disk", f"{_gib(free)} free", todo if free < MIN_DISK_GIB * 2**30 else "")


def write_access(root: Path) -> Row:
    name = "work" if (root / "work").exists() else "."
    try:
        with tempfile.TemporaryFile(dir=root / name):
            return Row("write access", f"to the course's folder {name}")
    except OSError as error:
        todo = "Make it a folder that you may write, or clone the course elsewhere."
        return Row("write access", f"{name}: {error.strerror}", todo)


def gpu() -> Row:
    import torch

    if not torch.cuda.is_available():
        return Row("GPU", "none; the course does not need one")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Row("GPU", ", ".join(f"{d.name} ({_gib(d.total_memory)})" for d in devices))


def kernel() -> Row:
    """Start the kernel that JupyterLab would start, with this Python, and end it."""
    from jupyter_client.manager import start_new_kernel

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60, **quiet)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    spec = manager.kernel_spec
    program = Path(spec.argv[0])  # a bare name, such as python, stands for this Python
    ours = program.parent in (Path("."), Path(sys.executable).parent)
    todo = "" if ours else f"Kernel python3 runs another Python, {program}: {_AGAIN}"
    return Row("kernel", f"{spec.display_name} starts", todo)


def widgets() -> Row:
    """JupyterLab's side of ipywidgets, without which the explorers show no sliders."""
    from jupyter_core.paths import jupyter_path
    from jupyterlab_server.config import get_federated_extensions, get_page_config

    name = "@jupyter-widgets/jupyterlab-manager"
    folders = jupyter_path("labextensions")
    extension = get_federated_extensions(folders).get(name)
    if extension is None:
        return Row("widgets", "no JupyterLab extension", f"Install jupyterlab_widgets: {_AGAIN}")
    disabled = get_page_config(folders).get("disabledExtensions", {})
    if disabled.get(name) if isinstance(disabled, dict) else name in disabled:
        return Row("widgets", "disabled", f"Run `jupyter labextension enable {name}`.")
    return Row("widgets", f"JupyterLab extension {extension['version']}, enabled")


def ranks() -> Row:
    """Four real ranks add up their numbers; each must hold the sum of all."""
    from course_lib import ranks

    results = ranks.run(_all_reduce, world_size=RANKS)
    expected = [sum(range(RANKS))] * RANKS
    todo = "" if results == expected else f"Each should hold {expected[0]}: report this defect."
    return Row("ranks", f"{RANKS} ranks all-reduce; each holds {results}", todo)


def _all_reduce() -> int:
    import torch
    import torch.distributed as dist

    mine = torch.tensor(dist.get_rank())
    dist.all_reduce(mine)
    return int(mine)


_AGAIN = "remove the environment, .venv, and run `make lab` again."


def _look(what: str, look: Callable) -> Iterable[Row]:
    """The rows of one look; whatever goes wrong in it is a row too, and the rest goes on."""
    try:
        rows = look()
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [Row(what, first, "It could not be looked at: see what it says, then try again.")]
    return [rows] if isinstance(rows, Row) else rows


def _pins(root: Path) -> dict[str, str]:
    lock = root / "requirements.lock"
    if not lock.exists():
        raise CourseError(f"{lock} is missing: restore it with `git checkout requirements.lock`.")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE))


def _direct() -> list[str]:
    """Names of the course's own dependencies, without those of its extras."""
    from importlib.metadata import requires

    lines = requires("sharded-training-course") or []
    return [re.match(r"[\w.-]+", line)[0].lower() for line in lines if "extra ==" not in line]


def _status(row: Row) -> str:
    return "ok   " if row.ok else "to do"


def _html_line(tag: str, cells: Iterable[str]) -> str:
    start = f'<{tag} style="text-align:left">'
    return f"<tr>{''.join(f'{start}{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
