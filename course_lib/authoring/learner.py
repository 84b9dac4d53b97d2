"""Make the learner's notebook from the executed solution: nbgrader's pipeline, and three steps.

The steps are preprocessors, so that stock `nbgrader generate_assignment` with the course's
configuration gives the same notebook as `course build`:

    TaskStub           in place of a solution: raise NotImplementedError("what to do")
    KeepExplorers      outputs are cleared, but what an explorer shows without a kernel stays
    ExpectFailures     a check's cell may raise: Run All goes on, nbval expects it
"""

import json
import re
import shutil
import textwrap
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import ClearOutput, ClearSolutions, NbGraderPreprocessor, SaveCells
from nbgrader.utils import capture_log, is_grade
from traitlets.config import Config

from course_lib.authoring.lesson import Lesson

EXPLORER = "explorer"
RAISES = "raises-exception"


class TaskStub(ClearSolutions):
    """nbgrader's ClearSolutions, with the exercise's task in the stub."""

    def preprocess_cell(self, cell, resources, cell_index):
        task = cell.metadata.pop("course", {}).get("task")
        if task:
            self.code_stub = {resources["language"]: stub(task)}
        return super().preprocess_cell(cell, resources, cell_index)


class KeepExplorers(ClearOutput):
    """nbgrader's ClearOutput, which leaves cells with the tag `explorer` as they are."""

    def preprocess_cell(self, cell, resources, cell_index):
        if EXPLORER in cell.metadata.get("tags", ()):
            return cell, resources
        return super().preprocess_cell(cell, resources, cell_index)


class ExpectFailures(NbGraderPreprocessor):
    """Tags the checks' cells, and takes the solution's stamp away."""

    def preprocess(self, nb, resources):
        nb.metadata.get("course", {}).pop("stamp", None)
        return super().preprocess(nb, resources)

    def preprocess_cell(self, cell, resources, cell_index):
        if is_grade(cell):
            cell.metadata["tags"] = [*cell.metadata.get("tags", ()), RAISES]
        return cell, resources


def stub(task: str) -> str:
    """The code that stands where a solution was; a long task is broken into lines."""
    lines = textwrap.wrap(task, 76, drop_whitespace=False)
    quoted = [json.dumps(line, ensure_ascii=False) for line in lines]
    if len(quoted) == 1 and len(quoted[0]) < 64:
        return f"raise NotImplementedError({quoted[0]})"
    return "\n".join(["raise NotImplementedError(", *(f"    {q}" for q in quoted), ")"])


def configure(config: Config, root: Path) -> None:
    """What nbgrader has to know of the course, whose folder is `root`."""
    config.CourseDirectory.root = str(root)
    config.CourseDirectory.course_id = "sharded-training"
    config.CourseDirectory.source_directory = "solutions"
    config.CourseDirectory.release_directory = "notebooks"
    ours = {ClearSolutions: TaskStub, ClearOutput: KeepExplorers}
    stock = GenerateAssignment.preprocessors.default_args[0]
    config.GenerateAssignment.preprocessors = [
        *(ours.get(step, step) for step in stock),
        ExpectFailures,
    ]


def release(solution: NotebookNode, lesson: Lesson, work: Path) -> Path:
    """Let nbgrader make the lesson's release folder, in the empty folder `work`.

    `solution` is the executed notebook; the lesson's assets go with it. Returns the folder.
    """
    there = Lesson(work, lesson.name)
    copy_assets(lesson, there.assignment)
    nbformat.write(solution, there.solution)
    config = Config()
    configure(config, work)
    config.CourseDirectory.assignment_id = lesson.name
    config.GenerateAssignment.no_database = True  # a gradebook is grading's, not a build's
    config.GenerateAssignment.preprocessors.remove(SaveCells)
    made = capture_log(GenerateAssignment(coursedir=CourseDirectory(config=config), config=config))
    if not made["success"] or not there.learner.is_file():
        raise lesson.refuse(f"nbgrader made no notebook for learners: {_reason(made)}")
    return there.released


def copy_assets(lesson: Lesson, folder: Path) -> None:
    """Copy what lies beside the solution, but no notebook, into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in lesson.assets():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(lesson.assignment / path, folder / path)


def _reason(made: dict) -> str:
    """The exception's own line in nbgrader's log, or else the last error."""
    log = made.get("log") or made.get("error") or "it gave no reason"
    raised = re.findall(r"^\s*([\w.]*(?:Error|Exception): .*)$", log, re.MULTILINE)
    return (raised or log.strip().splitlines())[-1].rstrip(".")
