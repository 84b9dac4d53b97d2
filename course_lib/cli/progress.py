"""`course progress`: what the learner has solved so far, from the checks that were run."""

from collections.abc import Iterable

import typer

from course_lib.cli import workspace


def progress() -> None:
    """Show your best score for each exercise."""
    from course_lib.checks import progress as log
    from course_lib.checks import registry

    root = workspace.find_root()
    records = log.read(root / "work" / workspace.FOLDER / log.FILE)
    exercises = [e for number in registry.lessons() for e in registry.exercises(number)]

    from rich.console import Console

    Console().print(table(exercises, best(records)))
    if not records:
        typer.echo("No check has been run yet: `course lab` opens the first lesson.")


def best(records: Iterable[dict]) -> dict[str, tuple[int, int]]:
    """For each exercise's id: the best score so far, and how often its check was run."""
    found: dict[str, tuple[int, int]] = {}
    for record in records:
        score, runs = found.get(record["exercise"], (0, 0))
        found[record["exercise"]] = (max(score, record["score"]), runs + 1)
    return found


def table(exercises: Iterable, scores: dict[str, tuple[int, int]]):
    """A rich table: a row for each exercise, a line and a total for each lesson."""
    from itertools import groupby

    from rich.table import Table

    drawn = Table("Exercise", "What", "Best score", "Runs", title="Progress")
    for lesson, group in groupby(exercises, key=lambda exercise: exercise.lesson):
        group = list(group)
        for exercise in group:
            score, runs = scores.get(exercise.id, (0, 0))
            drawn.add_row(exercise.id, exercise.title, f"{score} of {exercise.total}", str(runs))
        total = sum(min(scores.get(e.id, (0, 0))[0], e.total) for e in group)
        drawn.add_row(
            f"lesson {lesson}", "", f"{total} of {sum(e.total for e in group)}", "", style="bold"
        )
        drawn.add_section()
    return drawn
