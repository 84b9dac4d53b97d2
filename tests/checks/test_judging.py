"""The check's machinery on a toy exercise: what it says, and what it scores."""

import sys
import threading

import numpy as np
import pytest
import torch

from course_lib.checks.answering import outcomes
from course_lib.checks.checking import CheckFailed, PartialCredit, evaluate
from course_lib.checks.comparison import close, exactly
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.checks.judging import LIBRARY
from course_lib.checks.plain import NotPlain, plain


def double(x):
    return 2 * x


TOY = Exercise(
    id="99-double",
    title="Double it",
    task="Return twice x.",
    points={"small": 1, "large": 2},
    reference=double,
    alternatives=(lambda x: x + x,),
    cases=(Case("two", (3,), "small"), Case("big", (10**6,), "large")),
    fresh=lambda rng: [Case("random", (rng.randrange(5, 99),), "small")],
    library=(double,),
    misconceptions=(
        Misconception("square", lambda x: x * x, "You squared it.", "Add it to itself."),
        Misconception("triple", lambda x: 3 * x, "You tripled it."),
    ),
)


def report(answer, seed=1):
    return evaluate(TOY, answer, seed)


def test_a_correct_answer_passes_with_all_points():
    verdict = report(lambda x: x + x)
    assert verdict.passed and verdict.score == 3 and verdict.sentence == ""


def test_a_misconception_is_named_with_its_hint_and_its_smallest_case():
    verdict = report(lambda x: x**2)
    assert verdict.score == 0
    assert verdict.sentence == "You squared it." and verdict.further == "Add it to itself."
    assert verdict.failing.startswith("two: called with (3)")
    assert verdict.difference == "your answer is 9, not 6"


def test_partial_credit_for_the_part_that_holds():
    verdict = report(lambda x: x * 2 if x < 1000 else 0)
    assert verdict.score == 1
    assert [part.passed for part in verdict.parts] == [True, False]
    assert verdict.sentence == "The answer differs from the reference on the case below."


def test_the_stub_is_told_what_to_do():
    def stub(x):
        raise NotImplementedError("write me")

    assert report(stub).sentence == "Not solved yet: Return twice x."


def test_an_exception_is_shown_with_the_learners_line():
    def broken(x):
        return x / 0

    verdict = report(broken)
    assert verdict.sentence == "Your function raised ZeroDivisionError."
    assert "ZeroDivisionError" in verdict.difference and "return x / 0" in verdict.difference


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: lambda x: f(x)])
def test_calling_the_library_scores_nothing_under_any_alias(wrap):
    verdict = report(wrap(double))
    assert verdict.score == 0 and verdict.misconception == LIBRARY
    assert "`double`" in verdict.sentence


def test_fresh_cases_depend_on_the_seed_alone():
    assert TOY.all_cases(5) == TOY.all_cases(5)
    assert TOY.all_cases(5) != TOY.all_cases(6)


def test_a_typed_in_answer_fails_on_fresh_cases():
    assert report(lambda x: {3: 6, 10**6: 2 * 10**6}.get(x)).score == 2


def test_a_learner_cannot_change_the_cases():
    case = Case("list", ([1, 2],))
    outcomes(lambda items: items.clear(), [case])
    assert case.args == ([1, 2],)


def test_what_an_answer_prints_or_warns_is_kept_apart(capsys):
    def chatty(x):
        print("debug", x)
        print("on stderr", file=sys.stderr)
        return 0

    verdict = report(chatty)
    assert verdict.printed == "debug 3\non stderr\n"
    assert capsys.readouterr() == ("", "")


class AlwaysEqual(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def test_an_always_equal_answer_is_rebuilt_as_what_it_is():
    assert type(plain(AlwaysEqual(7))) is int
    assert report(lambda x: AlwaysEqual(0)).score == 0


def test_plain_rebuilds_containers_and_tensors():
    value = plain({"a": (1, 2.5), "t": torch.tensor([1, 2], dtype=torch.bfloat16)})
    assert value["a"] == [1, 2.5]
    assert isinstance(value["t"], np.ndarray) and value["t"].tolist() == [1, 2]
    with pytest.raises(NotPlain, match="returned a object|returned an object"):
        plain(object())


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (24, 24.0, None),
        (24, 25, "is 25, not 24"),
        (1, True, "is True, not 1"),
        ("a", "b", "is 'b', not 'a'"),
        (5, None, "no `return`"),
        ([1, 2], [1], "has 1 items, not 2"),
        ({"a": 1}, {"b": 1}, "has the keys"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a, item 1 is 3, not 2"),
        (np.ones(3), np.ones(2), "has shape"),
        (np.ones(3), np.zeros(3), r"is \[0.0, 0.0, 0.0\], not \[1.0"),
        (np.ones(30), np.zeros(30), "other values"),
        (np.ones(3), "text", "has shape"),
        (1.0, float("nan"), "is nan"),
    ],
)
def test_exactly_says_where_two_values_differ(expected, got, words):
    difference = exactly(expected, got)
    if words is None:
        assert difference is None
    else:
        import re

        assert re.search(words, difference)


def test_close_has_a_tolerance_and_keeps_it():
    assert close(1e-6)(1.0, 1.0 + 1e-7) is None
    assert close(1e-6)(1.0, 1.001) is not None


def test_partial_credit_reads_as_a_number():
    assert float(repr(PartialCredit(2))) == 2.0


def test_a_failed_check_shows_one_line():
    assert CheckFailed("99-double scored 0 of 3 points")._render_traceback_() == [
        "CheckFailed: 99-double scored 0 of 3 points"
    ]


class PretendsToBeATensor:
    def detach(self):
        return self

    cpu = detach

    def dim(self):
        return 0

    def item(self):
        return AlwaysEqual(0)


@pytest.mark.parametrize(
    "value",
    [PretendsToBeATensor(), 10**5000, [[1.0], [1.0, 2.0]], float("inf"), {"a": object()}],
    ids=["pretender", "huge", "ragged", "infinite", "an object inside"],
)
def test_whatever_an_answer_returns_a_report_comes_back(value):
    verdict = report(lambda x: value)
    assert verdict.score == 0 and verdict.difference


def test_a_ragged_list_is_compared_with_an_array():
    assert exactly(np.ones(2), [[1.0], [1.0, 2.0]]) is not None
    assert close(1e-6)(1.0, 10**5000) is not None


def test_an_answer_that_exits_is_an_outcome_too():
    verdict = report(lambda x: sys.exit(3))
    assert verdict.sentence == "Your function raised SystemExit."


def test_the_expected_values_are_worked_out_before_the_answer_runs():
    def vandal(x):
        double.__code__ = (lambda x: 0).__code__
        return 0

    before = double.__code__
    try:
        assert report(vandal).score == 0
    finally:
        double.__code__ = before


def test_a_lesson_made_of_the_reference_is_off_limits_as_a_whole():
    from grading.exercises import lesson_01

    helper = lesson_01._stages([(12, 1), (2, 2), (2, 3)])
    verdict = evaluate(lesson_01.STAGES, lambda *args: helper(*args), seed=1)
    assert verdict.score == 0 and verdict.misconception == LIBRARY


def test_the_library_is_seen_in_a_thread_too():
    def answer(n):
        found = []
        thread = threading.Thread(target=lambda: found.append(library_double(n)))
        thread.start()
        thread.join()
        return found[0]

    (outcome,) = outcomes(answer, [Case("one", (2,))], off_limits=(_qualified(library_double),))
    assert outcome.off_limits and outcome.value == 4


def library_double(n):
    return 2 * n


def _qualified(function) -> str:
    return f"{function.__module__}:{function.__qualname__}"
