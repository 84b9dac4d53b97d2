"""A learner's work is never overwritten (design rule 5)."""

import json
import os
import stat
from pathlib import Path

import pytest

from course_lib.cli import workspace
from course_lib.errors import CourseError

MINE = "my own work"
LEDGER = "01_memory_ledger/01_memory_ledger.ipynb"


def contents(folder: Path) -> dict[str, bytes]:
    """Everything a learner can see below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and workspace.FOLDER not in path.parts
    }


def start(root: Path) -> Path:
    """Seed, and write over the ledger's notebook as a learner does."""
    workspace.seed(root)
    mine = root / "work" / LEDGER
    mine.write_text(MINE)
    return mine


def ship(root: Path, text: str = "a newer lesson") -> None:
    (root / "notebooks" / LEDGER).write_text(text)


def test_seeding_copies_all_that_ships(root):
    said = workspace.seed(root)
    assert contents(root / "work") == contents(root / "notebooks")
    assert said == [
        "Lesson 00 is in work/00_start_here.",
        "Lesson 01 is in work/01_memory_ledger.",
    ]
    assert workspace.seed(root) == []


def test_seeding_leaves_what_is_there(root):
    mine = start(root)
    (root / "work/00_start_here/00_start_here.ipynb").unlink()
    workspace.seed(root)
    assert mine.read_text() == MINE
    assert (root / "work/00_start_here/00_start_here.ipynb").exists()


def test_seeding_leaves_out_what_jupyter_made(root):
    saved = root / "notebooks/01_memory_ledger/.ipynb_checkpoints/x-checkpoint.ipynb"
    saved.parent.mkdir()
    saved.write_text("{}")
    workspace.seed(root)
    assert not list((root / "work").rglob("*checkpoint*"))


def test_a_newer_lesson_is_announced_until_it_was_given(root):
    mine = start(root)
    assert workspace.seed(root) == []  # the learner's change is no update
    ship(root)
    announced = (
        "Lesson 01 has a newer version; `course reset 01 --beside` puts it beside your work."
    )
    assert workspace.seed(root) == [announced]
    assert workspace.seed(root) == [announced]
    assert mine.read_text() == MINE

    said = workspace.beside(root, workspace.find_lesson(root, "01"))
    assert len(said) == 1 and "01_memory_ledger.new-" in said[0]
    assert mine.read_text() == MINE
    assert b"a newer lesson" in contents(mine.parent).values()
    assert workspace.seed(root) == []


def test_who_has_the_newer_lesson_is_told_nothing(root):
    mine = start(root)
    ship(root)
    mine.write_text("a newer lesson")
    assert workspace.seed(root) == []
    mine.write_text(MINE)
    assert workspace.seed(root) == []


def test_reset_keeps_the_old_work_beside_the_fresh_one(root):
    mine = start(root)
    said = workspace.reset(root, workspace.find_lesson(root, "01"))
    assert mine.read_bytes() == (root / "notebooks" / LEDGER).read_bytes()
    kept = [path for path in mine.parent.glob("*.ipynb") if path != mine]
    assert [path.read_text() for path in kept] == [MINE]
    assert str(kept[0].relative_to(root)) in said[0]


def test_reset_of_untouched_work_makes_no_copy(root):
    workspace.seed(root)
    workspace.reset(root, workspace.find_lesson(root, "01"))
    assert contents(root / "work") == contents(root / "notebooks")


@pytest.mark.parametrize("action", [workspace.reset, workspace.beside])
def test_many_resets_in_one_second_lose_nothing(root, action):
    mine = start(root)
    lesson = workspace.find_lesson(root, "01")
    wrote, shipped = {MINE}, set()
    for turn in range(5):
        ship(root, f"version {turn}")
        shipped.add(f"version {turn}")
        action(root, lesson)
        mine.write_text(f"my work {turn}")
        wrote.add(f"my work {turn}")
    there = {content.decode() for content in contents(mine.parent).values()}
    assert there >= (wrote if action is workspace.reset else shipped)


def test_reset_before_any_seeding_puts_the_lesson(root):
    workspace.reset(root, workspace.find_lesson(root, "01"))
    assert (root / "work" / LEDGER).exists()


def test_work_of_unknown_origin_is_kept_and_not_announced(root):
    mine = root / "work" / LEDGER
    mine.parent.mkdir(parents=True)
    mine.write_text(MINE)
    said = workspace.seed(root)
    assert mine.read_text() == MINE
    assert not any("newer" in sentence for sentence in said)


@pytest.mark.parametrize("damage", ["{", "[]", "", "\x00\xff"])
def test_a_damaged_record_is_moved_aside(root, damage):
    mine = start(root)
    record = root / "work" / workspace.FOLDER / workspace.GIVEN
    record.write_text(damage)
    said = workspace.seed(root)
    assert "was damaged and is kept as given.damaged-" in said[0]
    aside = list(record.parent.glob("given.damaged-*"))
    assert [path.read_text() for path in aside] == [damage]
    assert LEDGER in json.loads(record.read_text())
    assert mine.read_text() == MINE


def test_half_a_file_is_never_left(tmp_path):
    with pytest.raises(TypeError):
        workspace._write_new(tmp_path / "lesson.ipynb", "text, where bytes are written")
    assert not (tmp_path / "lesson.ipynb").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_without_write_access_is_a_sentence(root):
    (root / "work").mkdir()
    (root / "work").chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(CourseError, match="could not be written"):
        workspace.seed(root)


def test_a_file_in_the_place_of_work_is_a_sentence(root):
    (root / "work").write_text("not a folder")
    with pytest.raises(CourseError, match="could not be written"):
        workspace.seed(root)


@pytest.mark.parametrize("name", ["01", "1", "01_memory_ledger"])
def test_a_lesson_has_three_names(root, name):
    assert workspace.find_lesson(root, name).name == "01_memory_ledger"


@pytest.mark.parametrize("name", ["99", "", "memory", "../01_memory_ledger", "001"])
def test_an_unknown_lesson_names_those_there_are(root, name):
    with pytest.raises(CourseError, match="the lessons are 00, 01"):
        workspace.find_lesson(root, name)


def test_the_root_is_found_from_below(root):
    workspace.seed(root)
    assert workspace.find_root(root / "work/01_memory_ledger") == root


def test_outside_a_checkout_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "__file__", str(tmp_path / "site-packages/a/b/c.py"))
    with pytest.raises(CourseError, match="not in a checkout of the course"):
        workspace.find_root(tmp_path)
