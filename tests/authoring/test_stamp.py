"""What a lesson is built from, found by reading imports."""

import pytest

from course_lib.authoring.stamp import imports, ingredients, stamp


@pytest.fixture
def library(lesson, edit):
    """The toy lesson with a small library: a imports b; c stands alone."""
    root = lesson.root
    files = {
        "course_lib/__init__.py": "",
        "course_lib/a.py": "def f():\n    from course_lib.b import deep\n",
        "course_lib/b/__init__.py": "",
        "course_lib/b/deep.py": "",
        "course_lib/b/figures.csv": "1,2\n",
        "course_lib/c.py": "",
        "grading/exercises/lesson_01.py": "",
        "grading/exercises/lesson_02.py": "",
        "course_lib/authoring/build.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    source = lesson.source.read_text()
    lesson.source.write_text(
        source.replace("# %%\nfrom IPython", "# %%\nfrom course_lib import a\n\nfrom IPython")
    )
    return lesson


def test_ingredients_are_found_through_imports(library):
    found = {p.relative_to(library.root).as_posix() for p in ingredients(library)}
    assert found == {
        "solutions/01_toy.py",
        "course_lib/__init__.py",
        "course_lib/a.py",
        "course_lib/b/__init__.py",
        "course_lib/b/deep.py",
        "course_lib/b/figures.csv",
        "course_lib/authoring/build.py",
        "grading/exercises/lesson_01.py",
    }


@pytest.mark.parametrize(
    "changed, file",
    [
        (True, "solutions/01_toy.py"),
        (True, "course_lib/b/deep.py"),
        (True, "course_lib/b/figures.csv"),
        (True, "course_lib/authoring/build.py"),
        (True, "grading/exercises/lesson_01.py"),
        (True, "solutions/01_toy/config.json"),
        (False, "course_lib/c.py"),
        (False, "grading/exercises/lesson_02.py"),
        (False, "solutions/01_toy/01_toy.ipynb"),
    ],
)
def test_the_stamp_changes_with_an_ingredient_only(library, changed, file):
    before = stamp(library)
    path = library.root / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "# more\n")
    assert (stamp(library) != before) == changed


def test_the_stamp_is_the_same_for_windows_line_ends(library):
    before = stamp(library)
    path = library.root / "course_lib" / "a.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert stamp(library) == before


def test_imports_of_every_form_are_read():
    code = "%matplotlib inline\nimport numpy, course_lib.a.b as x\nfrom course_lib import ranks\n"
    assert set(imports(code)) == {
        "course_lib",
        "course_lib.a",
        "course_lib.a.b",
        "course_lib.ranks",
    }
    assert set(imports("from .near import f", "course_lib.a")) == {
        "course_lib",
        "course_lib.a",
        "course_lib.a.near",
        "course_lib.a.near.f",
    }
    assert list(imports("def broken(")) == []
