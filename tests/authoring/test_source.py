"""Percent format in, notebook out: ids, nbgrader metadata, nothing left of the authors' own."""

import nbformat
import pytest

from course_lib.authoring.source import expand, read
from course_lib.errors import CourseError


def expanded(lesson, toys):
    return expand(read(lesson), lesson, toys)


def by_id(notebook):
    return {cell.id: cell for cell in notebook.cells}


def test_cells_get_ids_from_exercises_or_from_their_text(lesson, toys):
    ids = list(by_id(expanded(lesson, toys)))
    assert ids[4:6] == ["01-double", "check-01-double"]
    assert ids[0].startswith("markdown-") and ids[1].startswith("code-")
    assert ids == list(by_id(expanded(lesson, toys)))


def test_a_new_cell_leaves_the_other_ids_alone(lesson, toys, edit):
    before = set(by_id(expanded(lesson, toys)))
    edit(lesson, "# %% [markdown]\n# # Toy", "# %%\nnew = 1\n\n# %% [markdown]\n# # Toy")
    assert len(set(by_id(expanded(lesson, toys))) - before) == 1


def test_cells_with_the_same_text_are_told_apart(lesson, toys, edit):
    last = '# %%\nprint("the lesson goes on")\n'
    edit(lesson, last, last * 3)
    notebook = expanded(lesson, toys)
    ids = [cell.id for cell in notebook.cells][-3:]
    assert ids[1:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    nbformat.validate(notebook)


def test_exercise_and_check_get_nbgraders_metadata(lesson, toys):
    cells = by_id(expanded(lesson, toys))
    exercise, check = (cells[id].metadata.nbgrader for id in ("01-double", "check-01-double"))
    assert (exercise.solution, exercise.grade, exercise.grade_id) == (True, False, "01-double")
    assert (check.solution, check.grade, check.locked) == (False, True, True)
    assert (check.grade_id, check.points) == ("check-01-double", 2)


def test_only_jupyters_own_metadata_stays(lesson, toys, edit):
    edit(lesson, '# %%\nprint("the', '# %% long="a table" tags=["nbval-skip"]\nprint("the')
    notebook = expanded(lesson, toys)
    assert notebook.cells[-1].metadata == {"tags": ["nbval-skip"]}
    assert set(notebook.metadata) == {"kernelspec", "language_info", "course"}
    assert "version" not in notebook.metadata.language_info


@pytest.mark.parametrize("header", ['exersise="01-double"', "a title"])
def test_a_header_line_that_means_nothing_is_refused(lesson, edit, header):
    edit(lesson, '# %% exercise="01-double"', f"# %% {header}")
    with pytest.raises(CourseError, match=r"^Lesson 01: the code cell that begins 'def double"):
        read(lesson)
