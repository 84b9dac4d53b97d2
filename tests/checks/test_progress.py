"""The progress file: appended to, never lost."""

import json

import pytest

from course_lib.checks import progress
from course_lib.errors import CourseError

REPORT = {"exercise": "01-block", "points": 3, "score": 2, "sentence": "…", "parts": []}


@pytest.fixture
def path(tmp_path):
    (tmp_path / progress.FOLDER).mkdir()
    return progress.file(tmp_path)


def test_records_come_back_in_order(path):
    progress.record(REPORT, path)
    progress.record(REPORT | {"score": 3}, path)
    assert [r["score"] for r in progress.read(path)] == [2, 3]


def test_the_file_is_found_from_a_lessons_folder(path, tmp_path):
    lesson = tmp_path / "01_memory_ledger"
    lesson.mkdir()
    assert progress.file(lesson) == path


def test_outside_a_work_folder_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress.record(REPORT)
    assert progress.read() == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", [b'{"exercise": "01-bl\n', b"\xff\xfe\n", b'{"score": 1}\n', b"[]\n", b"[" * 200_000]
)
def test_a_damaged_file_is_moved_aside_and_what_can_be_read_is_kept(path, damage):
    progress.record(REPORT, path)
    with path.open("ab") as handle:
        handle.write(damage)
    before = path.read_bytes()
    with pytest.raises(CourseError, match="1 records that could be read were kept"):
        progress.read(path)
    (aside,) = path.parent.glob("progress.jsonl.damaged-*")
    assert aside.read_bytes() == before
    assert [r["exercise"] for r in progress.read(path)] == ["01-block"]


def test_a_read_only_disk_does_not_fail_a_check(path, monkeypatch):
    monkeypatch.setattr(progress.os, "open", lambda *a: (_ for _ in ()).throw(OSError("full")))
    progress.record(REPORT, path)
    assert not path.exists()


def test_a_record_is_one_line_of_json(path):
    progress.record(REPORT, path)
    assert json.loads(path.read_text())["points"] == 3
