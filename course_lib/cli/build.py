"""`course build`: both notebooks of each lesson, from its one source."""

from typing import Annotated

import typer

from course_lib.cli import workspace


def build(
    lessons: Annotated[
        list[str] | None,
        typer.Argument(help="Which lessons, as 01; all where none is named.", metavar="NN"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only compare with what is there; 1 where it differs.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Build lessons that are up to date, too.")
    ] = False,
) -> None:
    """Build the notebooks from solutions/*.py, where source, library or builder have changed."""
    from rich.console import Console

    from course_lib.authoring.build import build as build_lesson
    from course_lib.authoring.build import difference
    from course_lib.authoring.lesson import choose

    console = Console(highlight=False, soft_wrap=True)
    differ = False
    for lesson in choose(workspace.find_root(), lessons):
        with console.status(f"{lesson.name}: comparing") as status:
            exercises = _described(lesson.number)
            diff = "" if force and not check else difference(lesson, exercises)
            if check or not (diff or force):
                console.print(f"{lesson.name}: {'differs' if diff else 'up to date'}")
            else:
                build_lesson(lesson, exercises, lambda text, s=status: s.update(text))
                console.print(f"{lesson.name}: built")
        if check and diff:
            console.print(diff, markup=False)
            differ = True
    if differ:
        raise typer.Exit(1)


def _described(number: str) -> dict:
    """The registry's exercises of a lesson, by their ids."""
    from course_lib.checks import registry

    there = number in registry.lessons()
    return {exercise.id: exercise for exercise in registry.exercises(number)} if there else {}
