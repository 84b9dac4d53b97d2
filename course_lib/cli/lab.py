"""`course lab`: the learner's folder, then JupyterLab on the start page.

The folder jupyter/ beside this file is JupyterLab's configuration for learners: it asks nothing of
the network and shows none of nbgrader's menus, which are for those who grade.
"""

import os
import sys
from pathlib import Path

import typer

from course_lib.cli import workspace

SETTINGS = Path(__file__).parent / "jupyter"


def lab(ctx: typer.Context) -> None:
    """Open the course in JupyterLab.

    What follows is passed on to JupyterLab: course lab --no-browser --port 8899
    """
    root = workspace.find_root()
    for sentence in workspace.seed(root):
        typer.echo(sentence)
    path = [str(SETTINGS), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, path))
    # So that JupyterLab's terminals find `course`, and this environment's Python.
    commands = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    os.environ["PATH"] = os.pathsep.join(filter(None, commands))

    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(arguments(root, ctx.args))


def arguments(root: Path, more: list[str]) -> list[str]:
    """JupyterLab's command line: serve work/, and open the first lesson."""
    there = workspace.lessons(root)
    start = f"/tree/{there[0].notebook}" if there else ""
    own = [f"--ServerApp.root_dir={root / 'work'}", f"--LabApp.default_url=/lab{start}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        own.append("--ServerApp.allow_root=True")  # in a container there is often no one else
    return [*own, *more]  # the learner's own options come last, and win
