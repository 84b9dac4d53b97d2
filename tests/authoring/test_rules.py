"""Every refusal of a source: one change to the toy lesson, one sentence that names the cell."""

import pytest
from toy_course import exercise

from course_lib.authoring.rules import code_lines, keep, prose_words
from course_lib.authoring.source import read
from course_lib.errors import CourseError

DOUBLE = '# %% exercise="01-double"\n'
CHECK = '# %% check="01-double"\ncheck("01-double", double)\n'
HEADING = "# ### Exercise 01-double: Double a number (2 points)"
LAST = 'print("the lesson goes on")'
MANY = "\n".join(f"n_{i} = {i}" for i in range(26))
WORDS = " ".join(["word"] * 121)


def refuse(lesson, toys):
    with pytest.raises(CourseError) as refused:
        keep(read(lesson), lesson, toys)
    sentence = str(refused.value)
    assert sentence.startswith("Lesson 01: ") and sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_the_toy_lesson_keeps_the_rules(lesson, toys):
    keep(read(lesson), lesson, toys)


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        (CHECK, CHECK * 2, "the check 01-double is there 2 times"),
        ('exercise="01-half"', 'exercise="01-double"', "the exercise 01-double is there 2 times"),
        (CHECK, "", "the exercise 01-double has no check"),
        (DOUBLE, "# %%\n", "exercise 01-double has no cell"),
        ('    """Twice n, a number. double(2) is 4."""\n', "", "double has no docstring"),
        ("def double(n):", "def double(n)", "exercise 01-double is not Python"),
        ("    ### BEGIN SOLUTION\n    twice", "    twice", "needs one region from ### BEGIN"),
        ("    return twice_the_number\n    ### END SOLUTION", "    return 1", "needs one region"),
        (LAST, "### BEGIN SOLUTION\n### END SOLUTION", "has a marker BEGIN SOLUTION"),
        (CHECK, CHECK + "### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS", "has a marker BEGIN HIDD"),
        (CHECK, CHECK + "print(1)\n", "check 01-double should be the one line check('01-double'"),
        ('check("01-double", double)', 'check("01-half", double)', "should be the one line"),
        (HEADING, "#", "01-double has no heading before it: ### Exercise 01-double: Double a num"),
        ("(2 points)", "(3 points)", "heading of exercise 01-double says 'Double a number' and 3"),
        (": Double a number", ": Twice a number", "says 'Twice a number' and 2 points"),
        (LAST, MANY, "the code cell that begins 'n_0 = 0' has 26 lines, and 25 is the limit"),
        ("A lesson about doubling.", WORDS, "begins '# Toy' has 122 words, and 120 is the limit"),
    ],
)
def test_a_source_that_breaks_a_rule_is_refused(lesson, toys, edit, old, new, sentence):
    edit(lesson, old, new)
    assert sentence in refuse(lesson, toys)


def test_a_check_before_its_exercise_is_refused(lesson, toys, edit):
    edit(lesson, CHECK, "")
    edit(lesson, DOUBLE, CHECK + "\n" + DOUBLE)
    assert "the check 01-double stands before its exercise" in refuse(lesson, toys)


def test_a_heading_after_its_exercise_is_refused(lesson, toys, edit):
    edit(lesson, HEADING, "#")
    edit(lesson, LAST, f"{LAST}\n\n# %% [markdown]\n{HEADING}")
    assert "the exercise 01-double has no heading before it" in refuse(lesson, toys)


def test_an_exercise_that_the_registry_lacks_is_refused(lesson, toys):
    del toys["01-half"]
    assert "the exercise 01-half is not in the registry" in refuse(lesson, toys)


def test_an_exercise_that_the_lesson_lacks_is_refused(lesson, toys):
    toys["01-third"] = exercise("01-third", "A third", "Return a third of n.", 1)
    assert "the registry's exercise 01-third has no cell" in refuse(lesson, toys)


def test_a_heading_without_an_exercise_is_refused(lesson, toys, edit):
    edit(lesson, "# A lesson about", "# ### Exercise 01-third: A third (1 point)\n# A lesson about")
    assert "a heading for the exercise 01-third, which the registry lacks" in refuse(lesson, toys)


def test_a_long_cell_passes_with_a_reason(lesson, toys, edit):
    edit(lesson, f"# %%\n{LAST}", f'# %% long="a table of constants"\n{MANY}')
    keep(read(lesson), lesson, toys)


def test_an_empty_reason_is_none(lesson, toys, edit):
    edit(lesson, f"# %%\n{LAST}", f'# %% long=" "\n{MANY}')
    assert "26 lines" in refuse(lesson, toys)


def test_medians_are_limited(lesson, toys, edit):
    eleven = "\n".join(f"n_{i} = {i}" for i in range(11))
    edit(lesson, LAST, "\n\n".join([eleven, *[f"# %%\n{eleven}"] * 6]))
    assert "half of its code cells have 11 lines or more" in refuse(lesson, toys)


def test_the_median_of_prose_is_limited(lesson, toys, edit):
    prose = "# %% [markdown]\n# " + "word " * 71 + "\n\n"
    edit(lesson, f"# %%\n{LAST}", prose * 4)
    assert "half of its markdown cells have 71 words or more" in refuse(lesson, toys)


def test_python_inside_the_assignments_folder_is_refused(lesson, toys):
    lesson.assignment.mkdir()
    (lesson.assignment / "01_toy.py").write_text("# %%\n")
    assert "01_toy.py lies inside solutions/01_toy/" in refuse(lesson, toys)


def test_what_counts_as_a_line_and_as_a_word(lesson):
    cells = {cell.metadata.get("exercise", ""): cell for cell in read(lesson).cells}
    assert code_lines(cells["01-double"]) == 4  # no markers
    prose = cells["01-double"]
    prose.source = "Two words | = \n```\nnot these\n```\nand three more"
    assert prose_words(prose) == 5
