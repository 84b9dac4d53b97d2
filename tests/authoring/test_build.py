"""A lesson is built whole or not at all, the same each time, and only when it has to be."""

import json

import nbformat
import pytest

from course_lib.authoring import build as module
from course_lib.authoring.build import build, difference, swap
from course_lib.authoring.lesson import choose
from course_lib.errors import CourseError


def files(lesson):
    """All files of the course's folder but the source: {path: bytes}."""
    paths = (path for path in lesson.root.rglob("*") if path.is_file() and path != lesson.source)
    return {path.relative_to(lesson.root).as_posix(): path.read_bytes() for path in paths}


def test_building_twice_gives_the_same_bytes(built, toys):
    before = files(built)
    assert set(before) == {
        "solutions/01_toy/01_toy.ipynb",
        "solutions/01_toy/config.json",
        "notebooks/01_toy/01_toy.ipynb",
        "notebooks/01_toy/config.json",
    }
    build(built, toys)
    assert files(built) == before


def test_the_solution_is_executed_and_stamped(built):
    notebook = nbformat.read(built.solution, as_version=4)
    assert notebook.cells[-1].outputs[0].text == "the lesson goes on\n"
    assert len(notebook.metadata.course.stamp) == 12
    assert "twice_the_number" in built.solution.read_text()
    assert "twice_the_number" not in built.learner.read_text()


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("return n / 2", "return n / 3", "cell check-01-half failed with AssertionError"),
        ("(2 points)", "(3 points)", "the heading of exercise 01-double"),
        ('print("the lesson', 'twice_the_number = n + n\nprint("the lesson', "failed with NameErr"),
        ("A lesson about doubling.", "twice_the_number = n + n", "shows text of a solution"),
        ("    ### BEGIN SOLUTION\n    tw", "### BEGIN SOLUTION\n    tw", "would fail by itself"),
    ],
)
def test_a_failed_build_leaves_the_old_files_whole(built, toys, edit, old, new, sentence):
    before = files(built)
    edit(built, old, new)
    with pytest.raises(CourseError, match=sentence):
        build(built, toys)
    assert files(built) == before
    assert list((built.root / "build").iterdir()) == []


def test_a_swap_that_fails_half_way_is_undone(built, toys, edit, monkeypatch):
    before = files(built)
    edit(built, "the lesson goes on", "the lesson goes further")
    rename = module.os.rename

    def full(source, target):
        if target == built.released and "course" in source.parts:
            raise OSError("no space left on device")
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", full)
    with pytest.raises(OSError, match="no space"):
        build(built, toys)
    assert files(built) == before


def test_a_first_swap_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "new").write_text("new")
    with pytest.raises(FileNotFoundError):
        swap([(tmp_path / "new", tmp_path / "a"), (tmp_path / "absent", tmp_path / "b")], tmp_path)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_what_cells_write_does_not_ship(built, toys, edit):
    edit(built, 'print("the lesson', 'open("left.txt", "w").write("x")\nprint("the lesson')
    build(built, toys)
    assert not [name for name in files(built) if "left.txt" in name]


def test_a_removed_asset_goes_from_the_release_too(built, toys):
    (built.assignment / "config.json").unlink()
    assert "notebooks/01_toy/config.json should not be there" in difference_after_stamp(built, toys)
    build(built, toys)
    assert set(files(built)) == {"solutions/01_toy/01_toy.ipynb", "notebooks/01_toy/01_toy.ipynb"}


def difference_after_stamp(lesson, toys):
    """The difference, where the stamp alone has been set right."""
    notebook = nbformat.read(lesson.solution, as_version=4)
    notebook.metadata.course.stamp = module.stamp(lesson)
    nbformat.write(notebook, lesson.solution)
    return difference(lesson, toys)


def test_built_notebooks_do_not_differ_from_their_source(built, toys):
    assert difference(built, toys) == ""


def test_a_lesson_not_built_differs(lesson, toys):
    assert difference(lesson, toys) == "01_toy has not been built yet"


def test_a_changed_source_is_shown_as_a_short_diff(built, toys, edit):
    edit(built, "the lesson goes on", "the lesson goes further")
    diff = difference(built, toys)
    assert '-    "print(\\"the lesson goes on\\")"' in diff
    assert '+    "print(\\"the lesson goes further\\")"' in diff
    assert len(diff.splitlines()) < 40


def test_a_changed_library_differs(built, toys):
    exercises = built.root / "grading" / "exercises"
    exercises.mkdir(parents=True)
    (exercises / "lesson_01.py").write_text("# new\n")
    assert "was built before its source, its library or the builder changed" in (
        difference(built, toys)
    )


@pytest.mark.parametrize("where", ["solution", "learner"])
def test_an_edited_notebook_differs(built, toys, where):
    path = getattr(built, where)
    path.write_text(path.read_text().replace("# Toy", "# Toys"))
    assert "# Toys" in difference(built, toys)


def test_other_points_in_the_notebook_differ(built, toys):
    path = built.learner
    path.write_text(path.read_text().replace('"points": 2', '"points": 20'))
    assert '"points": 20' in difference(built, toys)


def test_solutions_outputs_that_prove_nothing_differ(built, toys):
    notebook = nbformat.read(built.solution, as_version=4)
    for cell in notebook.cells:
        if cell.id == "check-01-half":
            cell.outputs = [nbformat.v4.new_output("stream", name="stderr", text="!")]
    nbformat.write(notebook, built.solution)
    assert "check-01-half gives the lesson's own solution 0 of 1" in difference(built, toys)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": ['])
def test_a_broken_notebook_differs(built, toys, text):
    built.solution.write_text(text)
    assert difference(built, toys)


def test_comparing_writes_nothing(built, toys, edit):
    before = files(built)
    difference(built, toys)
    edit(built, "the lesson goes on", "the lesson goes further")
    difference(built, toys)
    assert files(built) == before


def test_lessons_are_chosen_by_number_or_name(built):
    (built.root / "solutions" / "02_more.py").write_text("")
    assert [lesson.name for lesson in choose(built.root, None)] == ["01_toy", "02_more"]
    for name in ("1", "01", "01_toy"):
        assert [lesson.name for lesson in choose(built.root, [name])] == ["01_toy"]
    with pytest.raises(CourseError, match="no lesson '7' in solutions/, which has 01, 02"):
        choose(built.root, ["01", "7"])


def test_the_report_of_a_build_names_each_cell(built, toys):
    told = []
    build(built, toys, told.append)
    assert told[0] == "cell 1 of 10" and told[-1] == "the learner's notebook"
    assert json.loads(built.learner.read_text())["nbformat"] == 4
