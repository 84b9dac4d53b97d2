"""`course reset` and `course lab`: what they say and do on the command line."""

import json
import os

import pytest

from course_lib.cli import lab, workspace
from course_lib.errors import CourseError


def test_reset_says_where_the_old_work_is(root, course):
    workspace.seed(root)
    mine = root / "work/01_memory_ledger/01_memory_ledger.ipynb"
    mine.write_text("mine")
    result = course("reset", "01")
    assert result.exit_code == 0
    assert "is kept as work/01_memory_ledger/01_memory_ledger.2" in result.stdout
    assert mine.read_text() != "mine"


def test_reset_beside_leaves_the_work(root, course):
    workspace.seed(root)
    mine = root / "work/01_memory_ledger/01_memory_ledger.ipynb"
    mine.write_text("mine")
    result = course("reset", "01", "--beside")
    assert result.exit_code == 0
    assert "01_memory_ledger.new-2" in result.stdout
    assert mine.read_text() == "mine"


def test_reset_of_an_unknown_lesson_is_bad_input(root, course):
    with pytest.raises(CourseError, match="There is no lesson '42'"):
        course("reset", "42")


def test_lab_opens_the_first_lesson_and_passes_options_on(root, course, monkeypatch):
    from jupyterlab.labapp import LabApp

    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "the-learner's-own")
    launched = []
    monkeypatch.setattr(LabApp, "launch_instance", lambda argv: launched.extend(argv))
    result = course("lab", "--no-browser", "--port", "8899")
    assert result.exit_code == 0
    assert launched[-3:] == ["--no-browser", "--port", "8899"]
    assert f"--ServerApp.root_dir={root / 'work'}" in launched
    assert "--LabApp.default_url=/lab/tree/00_start_here/00_start_here.ipynb" in launched
    assert (root / "work/00_start_here/00_start_here.ipynb").exists()
    settings, _, own = os.environ["JUPYTER_CONFIG_PATH"].partition(os.pathsep)
    assert settings == str(lab.SETTINGS) and own == "the-learner's-own"


def test_a_learner_sees_no_grading_menus_and_no_news(monkeypatch):
    from jupyter_core.paths import jupyter_path
    from jupyterlab_server.config import get_page_config

    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(lab.SETTINGS))
    assert get_page_config(jupyter_path("labextensions"))["disabledExtensions"]
    overrides = json.loads((lab.SETTINGS / "labconfig/default_setting_overrides.json").read_text())
    (notification,) = overrides.values()
    assert notification == {"fetchNews": "false", "checkForUpdates": False}
    server = json.loads((lab.SETTINGS / "jupyter_server_config.d/course.json").read_text())
    assert not any(server["ServerApp"]["jpserver_extensions"].values())


def test_lab_without_lessons_still_opens(tmp_path):
    (tmp_path / "notebooks").mkdir()
    assert "--LabApp.default_url=/lab" in lab.arguments(tmp_path, [])
