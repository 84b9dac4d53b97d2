"""`course reset`: begin a lesson again, and lose nothing."""

from typing import Annotated

import typer

from course_lib.cli import workspace


def reset(
    lesson: Annotated[str, typer.Argument(help="The lesson's number: 01.", metavar="NN")],
    beside: Annotated[
        bool, typer.Option("--beside", help="Leave your work; put the new version beside it.")
    ] = False,
) -> None:
    """Begin a lesson again, and keep your work beside it."""
    root = workspace.find_root()
    found = workspace.find_lesson(root, lesson)
    said = workspace.beside(root, found) if beside else workspace.reset(root, found)
    for sentence in said:
        typer.echo(sentence)
