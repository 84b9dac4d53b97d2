"""Stock nbgrader, with grading/nbgrader_config.py, in a copy of the course."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook

CONFIG = Path(__file__).parents[2] / "grading" / "nbgrader_config.py"


@pytest.fixture
def course(built):
    (built.root / "grading").mkdir()
    shutil.copy(CONFIG, built.root / "grading")
    return built


def nbgrader(course, *arguments):
    # nbgrader looks for its database's tool, alembic, on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=course.root / "grading",
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def submit(course, student, answers):
    """Hand in the learner's notebook with some answers written into it."""
    notebook = nbformat.read(course.learner, as_version=4)
    for cell in notebook.cells:
        if cell.id in answers:
            cell.source = cell.source[: cell.source.index("raise")] + answers[cell.id]
    folder = course.root / "grading" / "submitted" / student / course.name
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / course.learner.name)


def test_a_submission_is_scored(course):
    released = course.learner.read_bytes()
    nbgrader(
        course,
        "generate_assignment",
        course.name,
        "--CourseDirectory.release_directory=build/release",
    )
    assert (course.root / "build/release" / course.name / course.learner.name).read_bytes() == (
        released
    )
    submit(course, "ada", {"01-double": "return n * 2", "01-half": "return n * 0.5"})
    submit(course, "ben", {})
    nbgrader(course, "autograde", course.name)

    with Gradebook(f"sqlite:///{course.root / 'grading' / 'gradebook.db'}") as book:
        scores = {s.student.id: s.score for s in book.assignment_submissions(course.name)}
        unanswered = book.find_submission_notebook(course.learner.stem, course.name, "ben")
        comments = {c.name: c.auto_comment for c in unanswered.comments}
    assert scores == {"ada": 3, "ben": 0}
    assert comments == {"01-double": "No response.", "01-half": "No response."}
    assert course.learner.read_bytes() == released
