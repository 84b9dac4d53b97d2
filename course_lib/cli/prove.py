"""`course prove`: can every check fail, and pass?"""

from typing import Annotated

import typer


def prove(
    lesson: Annotated[str, typer.Argument(help="A lesson's number; all lessons by default.")] = "",
) -> None:
    """Put the stub, each misconception and each correct solution to every check."""
    from course_lib.checks import proving, registry

    failed = 0
    for number in [lesson] if lesson else registry.lessons():
        for exercise in registry.exercises(number):
            proofs = proving.prove(exercise)
            typer.echo(f"{exercise.id}: {exercise.title}, {exercise.total} points")
            for proof in proofs:
                failed += not proof.held
                typer.echo(
                    f"  {'held  ' if proof.held else 'FAILED'} {proof.answer}: {proof.expected}"
                )
                if not proof.held:
                    typer.echo(f"         but: {proof.got}")
    typer.echo("Every check held." if not failed else f"{failed} proofs failed.")
    raise typer.Exit(1 if failed else 0)
