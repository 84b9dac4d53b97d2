"""`check` as a cell calls it: panel, score, progress, errors."""

import pytest
import torch
import torch.distributed as dist

from course_lib.checks import check, checking, progress, registry
from course_lib.errors import CourseError


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """The bundles that were displayed; checks run in a learner's work folder."""
    (tmp_path / progress.FOLDER).mkdir()
    lesson = tmp_path / "00_start_here"
    lesson.mkdir()
    monkeypatch.chdir(lesson)
    bundles = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: bundles.append(data))
    return bundles


def test_a_solved_exercise_shows_a_panel_and_is_recorded(shown):
    assert check("00-gib", lambda n: n / 1024**3) is None
    assert "passed" in shown[0]["text/plain"]
    assert [(r["exercise"], r["score"]) for r in progress.read()] == [("00-gib", 1)]


def test_a_wrong_answer_raises_after_its_panel(shown):
    with pytest.raises(checking.CheckFailed, match="00-gib scored 0 of 1 points"):
        check("00-gib", lambda n: n / 10**9)
    assert "10^9" in shown[0]["text/html"]
    assert progress.read()[0]["score"] == 0


def test_partial_credit_is_the_cells_result(shown):
    def untied_only(config, block):
        table = config["vocab_size"] * config["hidden_size"]
        return 2 * table + config["num_hidden_layers"] * block + config["hidden_size"]

    assert repr(check("01-model", untied_only)) == "2"


def test_a_seed_repeats_the_cases(shown):
    for _ in range(2):
        with pytest.raises(checking.CheckFailed):
            check("00-gib", lambda n: 0, seed=3)
    assert shown[0] == shown[1]


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(CourseError, match="did you mean .*01-block"):
        check("01-blok", abs)


def test_a_result_instead_of_a_function_is_told():
    with pytest.raises(CourseError, match="without calling it"):
        check("00-gib", 3.0)


def test_the_solution_can_be_kept_out(shown, monkeypatch):
    monkeypatch.setenv("COURSE_HIDE_SOLUTIONS", "1")
    with pytest.raises(checking.CheckFailed):
        check("00-gib", lambda n: 0)
    assert "Show a solution" not in shown[0]["text/html"]


@pytest.mark.parametrize("id", ["03-exchange", "03-reduce-scatter", "03-all-gather", "04-average"])
def test_the_solution_that_is_shown_can_be_put_into_the_notebook(id):
    from course_lib.sharded import ring

    def my_answer():
        """Named as no reference is."""

    notebook = {"ring": ring, "torch": torch, "dist": dist}
    exec(checking._solution(registry.find(id), my_answer), notebook)
    report = checking.evaluate(registry.find(id), notebook["my_answer"], seed=1)
    assert report.passed, report.sentence
