"""What a learner sees of a report."""

from test_judging import TOY, report

from course_lib.checks import panel


def test_a_passed_report_is_one_line_without_seed():
    passed = report(lambda x: x + x)
    assert panel.text(passed) == "99-double · Double it: passed, 3 points"
    assert "seed" not in panel.html(passed)


def test_a_failed_panel_names_idea_case_and_seed_and_folds_hint_and_solution():
    failed = report(lambda x: x * x, seed=7)
    html = panel.html(failed, solution="def double(x): return 2 * x")
    for words in ("You squared it.", "two: called with (3)", "is 9, not 6", "seed=7"):
        assert words in html
    assert "<summary>A further hint</summary><p>Add it to itself.</p>" in html
    assert "<summary>Show a solution</summary>" in html


def test_what_a_learner_printed_cannot_become_markup():
    def printing(x):
        print("<script>alert(1)</script>")

    assert "<script>" not in panel.html(report(printing))


def test_the_bundle_carries_the_report_as_plain_data():
    data = panel.bundle(report(lambda x: x * x))[panel.MIME]
    assert data["exercise"] == "99-double" and data["score"] == 0 and data["passed"] is False
    assert TOY.id == data["exercise"]
