"""Read a lesson's source: percent format in, notebook out.

Authors write no nbgrader metadata. They name a cell's part in its header line, and the rest follows
from the registry:

    # %% exercise="01-block"    nbgrader: a solution cell with grade_id 01-block
    # %% check="01-block"       nbgrader: a locked grade cell, check-01-block, with the points

Cell ids are made from the exercise's id or from the cell's text, so that the same source always
gives the same notebook.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

import jupytext
import nbformat
from nbformat import NotebookNode

from course_lib.authoring.lesson import Lesson
from course_lib.checks.exercise import Exercise

# What may stand in a cell's header line. `tags` and `jupyter` are Jupyter's own and stay.
AUTHORS_KEYS = {"exercise", "check", "long"}
JUPYTERS_KEYS = {"tags", "jupyter"}
# jupytext's notes to itself on empty lines.
JUPYTEXTS_KEYS = {"lines_to_next_cell", "lines_to_end_of_cell_marker", "cell_marker"}

METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    },
}


def read(lesson: Lesson) -> NotebookNode:
    """The source as cells, with the authors' own metadata: exercise, check, long, tags.

    Raises CourseError for a header line with a key that is not known.
    """
    notebook = jupytext.read(lesson.source, fmt="py:percent")
    for cell in notebook.cells:
        for key in sorted(set(cell.metadata) - AUTHORS_KEYS - JUPYTERS_KEYS - JUPYTEXTS_KEYS):
            raise lesson.refuse(
                f"{describe(cell)} has {key}={cell.metadata[key]!r} in its header line, where only "
                f"{', '.join(sorted(AUTHORS_KEYS | JUPYTERS_KEYS))} may stand"
            )
    return notebook


def expand(source: NotebookNode, lesson: Lesson, exercises: Mapping[str, Exercise]) -> NotebookNode:
    """The solution notebook, not executed yet. `source` has passed the rules."""
    ids = _ids(source.cells)
    cells = [_expand(cell, id, exercises) for cell, id in zip(source.cells, ids, strict=True)]
    metadata = nbformat.from_dict(METADATA | {"course": {"lesson": lesson.name}})
    return NotebookNode(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=5)


def _expand(cell: NotebookNode, id: str, exercises: Mapping[str, Exercise]) -> NotebookNode:
    metadata = {key: cell.metadata[key] for key in sorted(JUPYTERS_KEYS & set(cell.metadata))}
    if "exercise" in cell.metadata:
        exercise = exercises[cell.metadata["exercise"]]
        metadata["nbgrader"] = _nbgrader(exercise.id, solution=True)
        metadata["course"] = {"task": exercise.task}  # what the learner's stub will say
    if "check" in cell.metadata:
        points = exercises[cell.metadata["check"]].total
        metadata["nbgrader"] = _nbgrader(id, grade=True, locked=True, points=points)
    make = getattr(nbformat.v4, f"new_{cell.cell_type}_cell")
    return make(cell.source, id=id, metadata=nbformat.from_dict(metadata))


def _nbgrader(grade_id: str, **more) -> dict:
    empty = {"grade": False, "locked": False, "solution": False, "task": False}
    return empty | {"schema_version": 3, "grade_id": grade_id} | more


def cell_name(cell: NotebookNode) -> str:
    """What a cell is called: the exercise, the check, or its kind and its text's fingerprint."""
    if "exercise" in cell.metadata:
        return cell.metadata["exercise"]
    if "check" in cell.metadata:
        return f"check-{cell.metadata['check']}"
    return f"{cell.cell_type}-{hashlib.sha256(cell.source.encode()).hexdigest()[:8]}"


def describe(cell: NotebookNode) -> str:
    """A cell as its author knows it, for a message."""
    for part in ("exercise", "check"):
        if part in cell.metadata:
            return f"{part} {cell.metadata[part]}"
    first = next((line.strip() for line in cell.source.splitlines() if line.strip()), "")
    return f"the {cell.cell_type} cell that begins {first[:60]!r}"


def _ids(cells: list[NotebookNode]) -> list[str]:
    """Names made unique: the second cell of the same name gets -2, and so on."""
    seen, ids = Counter(), []
    for name in map(cell_name, cells):
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids
