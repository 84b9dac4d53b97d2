"""The learner's notebook: stubs, tags, explorers, and nbgrader's own metadata."""

import json

import nbformat
import pytest
from nbgrader.nbgraderformat import MetadataValidator
from nbgrader.utils import compute_checksum

from course_lib.authoring import learner
from course_lib.authoring.learner import release, stub
from course_lib.errors import CourseError


@pytest.fixture
def notebook(built):
    return nbformat.read(built.learner, as_version=4)


def cell(notebook, id):
    return next(cell for cell in notebook.cells if cell.id == id)


def test_a_stub_keeps_signature_and_docstring_and_says_what_to_do(notebook):
    assert cell(notebook, "01-half").source == (
        "def half(n):\n"
        '    """Half of n, a number. half(3) is 1.5."""\n'
        '    raise NotImplementedError("Return half of n, also of an odd n.")'
    )


@pytest.mark.parametrize("task", ["Short.", 'Say "hello" \\ and é.', "Count every weight. " * 9])
def test_a_stub_raises_its_task_whatever_its_length(task):
    assert max(map(len, stub(task).splitlines())) <= 88
    with pytest.raises(NotImplementedError) as raised:
        exec(stub(task))
    assert str(raised.value) == task


def test_checks_are_expected_to_fail_in_the_learners_notebook_only(built, notebook):
    solution = nbformat.read(built.solution, as_version=4)
    for id in ("check-01-double", "check-01-half"):
        assert cell(notebook, id).metadata.tags == ["raises-exception"]
        assert "tags" not in cell(solution, id).metadata


def test_explorers_keep_their_picture_and_all_else_is_not_run(notebook):
    ran = [cell for cell in notebook.cells if cell.get("outputs")]
    assert [cell.metadata.tags for cell in ran] == [["explorer"]]
    assert set(ran[0].outputs[0].data) == {"text/html", "text/plain"}
    assert ran[0].execution_count is not None  # nbval refuses outputs without it
    unrun = [c for c in notebook.cells if c.cell_type == "code" and c is not ran[0]]
    assert all(cell.execution_count is None for cell in unrun)


def test_nbgraders_metadata_is_valid_and_its_checksums_hold(notebook):
    MetadataValidator().validate_nb(notebook)
    graded = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
    assert len(graded) == 4
    for each in graded:
        assert each.metadata.nbgrader.checksum == compute_checksum(each)


def test_neither_the_stamp_nor_a_task_stays_in_metadata(notebook):
    assert notebook.metadata.course == {"lesson": "01_toy"}
    assert all("course" not in cell.metadata for cell in notebook.cells)


def test_assets_ship_and_other_notebooks_do_not(built, tmp_path):
    (built.assignment / "copy.ipynb").write_text("{}")
    (built.assignment / "data").mkdir()
    (built.assignment / "data" / "table.csv").write_text("a,b\n")
    solution = nbformat.read(built.solution, as_version=4)
    folder = release(solution, built, tmp_path / "work")
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert files == {"01_toy.ipynb", "config.json", "data/table.csv"}
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": 8}


def test_what_nbgrader_says_becomes_the_message(built, tmp_path, monkeypatch):
    def explode(self, cell, resources, cell_index):
        raise RuntimeError("the stub is broken")

    monkeypatch.setattr(learner.TaskStub, "preprocess_cell", explode)
    solution = nbformat.read(built.solution, as_version=4)
    with pytest.raises(CourseError, match="^Lesson 01: .*RuntimeError: the stub is broken"):
        release(solution, built, tmp_path / "work")
