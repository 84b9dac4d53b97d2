"""A toy course in a temporary folder: one lesson, two exercises, an explorer, no torch."""

from pathlib import Path

from course_lib.authoring.lesson import Lesson
from course_lib.checks.exercise import Exercise

TOY = '''\
# %% [markdown]
# # Toy
#
# A lesson about doubling.

# %%
from IPython.display import display


def check(id, answer):
    assert answer(3) == {"01-double": 6, "01-half": 1.5}[id]


# %% tags=["explorer"]
bundle = {"text/html": "<img alt='a bar' src=''>", "text/plain": "Explorer()"}
display(bundle | {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}, raw=True)

# %% [markdown]
# ### Exercise 01-double: Double a number (2 points)

# %% exercise="01-double"
def double(n):
    """Twice n, a number. double(2) is 4."""
    ### BEGIN SOLUTION
    twice_the_number = n + n
    return twice_the_number
    ### END SOLUTION


# %% check="01-double"
check("01-double", double)

# %% [markdown]
# ### Exercise 01-half: Halve a number (1 point)

# %% exercise="01-half"
def half(n):
    """Half of n, a number. half(3) is 1.5."""
    ### BEGIN SOLUTION
    return n / 2
    ### END SOLUTION


# %% check="01-half"
check("01-half", half)

# %%
print("the lesson goes on")
'''


def exercise(id: str, title: str, task: str, points: int) -> Exercise:
    return Exercise(id, title, task, {"all": points}, reference=abs, cases=(), misconceptions=())


def registry() -> dict[str, Exercise]:
    """The toy registry."""
    return {
        "01-double": exercise("01-double", "Double a number", "Return twice n.", 2),
        "01-half": exercise("01-half", "Halve a number", "Return half of n, also of an odd n.", 1),
    }


def found(root: Path) -> Lesson:
    """A course's folder with the toy lesson's source in it."""
    for folder in ("solutions", "notebooks", "course_lib"):
        (root / folder).mkdir(parents=True)
    lesson = Lesson(root, "01_toy")
    lesson.source.write_text(TOY)
    return lesson
