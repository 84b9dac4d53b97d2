"""The `course` command.

Each command is a function of its own name in a module of its own name, imported when it is called:
`course ledger` answers before torch, Jupyter or matplotlib could have been loaded.
"""

import importlib
import sys

import typer
from typer.core import TyperGroup

from course_lib.errors import CourseError

# In the order in which `course --help` lists them; what a learner needs first comes first.
COMMANDS = ("lab", "doctor", "check", "progress", "reset", "ledger", "build", "prove")

# What `course lab` does not know is JupyterLab's.
SETTINGS = {"lab": {"allow_extra_args": True, "ignore_unknown_options": True}}


class OnDemand(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx):
        return list(COMMANDS)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in COMMANDS:
            return None
        function = getattr(importlib.import_module(f"{__name__}.{cmd_name}"), cmd_name)
        command = typer.Typer(add_completion=False)
        command.command(cmd_name, context_settings=SETTINGS.get(cmd_name))(function)
        return typer.main.get_command(command)


app = typer.Typer(
    cls=OnDemand, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def course() -> None:
    """Sharded data-parallel training: price the trade of communication for memory."""


def main() -> None:
    """Run the command line. Bad input is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may not know every sign
    try:
        code = app(standalone_mode=False)
    except CourseError as error:
        _refuse(str(error))
    except Exception as error:
        # A usage error of the command-line parser: a number that is none, an unknown command.
        if not hasattr(error, "format_message"):
            raise
        _refuse(f"{error.format_message()} `course --help` lists what there is.")
    raise SystemExit(code)


def _refuse(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    raise SystemExit(2) from None
