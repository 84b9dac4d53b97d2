"""`course doctor`: each line is ok or says what to do."""

import pytest

from course_lib.cli import doctor
from course_lib.cli.doctor import Report, Row
from course_lib.errors import CourseError

GIB = 2**30


def test_the_old_python_is_told_what_to_do():
    assert doctor.python((3, 11, 0)).ok
    assert "Install Python 3.11 or newer" in doctor.python((3, 10, 13)).todo


def test_versions_are_held_against_the_pins():
    from importlib.metadata import version

    pins = {name: version(name).split("+")[0] for name in doctor._direct()}
    rows = {row.what: row for row in doctor.packages(pins)}
    assert all(row.ok for row in rows.values())
    assert rows["torch"].found == version("torch")

    rows = {row.what: row for row in doctor.packages(pins | {"torch": "1.0", "rich": "0.1"})}
    assert "1.0 is pinned" in rows["torch"].todo
    assert "0.1 is pinned" in rows["rich"].todo
    assert rows["jupyterlab"].ok


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_direct", lambda: ["no-such-package"])
    (row, _) = doctor.packages({"no-such-package": "1.0"})
    assert row.found == "not installed" and "1.0 is pinned" in row.todo


def test_small_machines_are_told_so(tmp_path):
    assert doctor.cores(2).ok and not doctor.cores(1).ok
    assert doctor.memory(8 * GIB).ok and not doctor.memory(GIB).ok
    assert doctor.disk(tmp_path, 2 * GIB).ok and not doctor.disk(tmp_path, GIB // 2).ok


def test_write_access(tmp_path):
    row = doctor.write_access(tmp_path)
    assert row.ok and str(tmp_path) not in row.found  # it is read in a lesson, by others too
    (tmp_path / "work").write_text("not a folder")
    assert "a folder that you may write" in doctor.write_access(tmp_path).todo


def test_a_look_that_fails_is_a_row_and_not_the_end():
    def fails():
        raise RuntimeError("no driver\nand more")

    (row,) = doctor._look("GPU", fails)
    assert (row.what, row.found, row.ok) == ("GPU", "no driver", False)


def test_a_missing_lock_is_a_sentence(tmp_path):
    with pytest.raises(CourseError, match="requirements.lock is missing"):
        doctor._pins(tmp_path)


def test_a_report_draws_itself():
    report = Report((Row("cores", "2"), Row("<disk>", "0.1 GiB free", "Free some.")))
    assert not report.ok
    assert str(report).splitlines() == [
        "cores   ok     2",
        "<disk>  to do  0.1 GiB free",
        "               Free some.",
        "1 of 2 lines say what to do.",
    ]
    assert "&lt;disk&gt;" in report._repr_html_() and "Free some." in report._repr_html_()
    ready = Report((Row("cores", "2"),))
    assert "This machine is ready for the course." in ready._repr_html_()
    assert "what to do" not in ready._repr_html_()


def test_the_command_ends_with_1_when_something_is_to_do(course, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: Report((Row("cores", "1", "Wait."),)))
    result = course("doctor")
    assert result.exit_code == 1 and "Wait." in result.stdout
    monkeypatch.setattr(doctor, "examine", lambda: Report((Row("cores", "2"),)))
    assert course("doctor").exit_code == 0


def test_this_machine_is_ready():
    report = doctor.examine()
    looked = {row.what for row in report.rows}
    assert {"Python", "torch", "GPU", "kernel", "widgets", "ranks", "write access"} <= looked
    needed = [row for row in report.rows if row.what not in ("cores", "memory", "disk")]
    assert [row for row in needed if not row.ok] == []
