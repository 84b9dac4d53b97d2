"""The toy lesson, with and without its notebooks."""

import shutil

import pytest
import toy_course

from course_lib.authoring.build import build
from course_lib.authoring.lesson import Lesson


@pytest.fixture
def toys() -> dict:
    """The toy registry."""
    return toy_course.registry()


@pytest.fixture
def lesson(tmp_path) -> Lesson:
    """The toy lesson, not built yet."""
    return toy_course.found(tmp_path / "course")


@pytest.fixture(scope="session")
def built_once(tmp_path_factory) -> Lesson:
    lesson = toy_course.found(tmp_path_factory.mktemp("toy") / "course")
    lesson.assignment.mkdir()
    (lesson.assignment / "config.json").write_text('{"hidden_size": 8}\n')
    build(lesson, toy_course.registry())
    return lesson


@pytest.fixture
def built(built_once, tmp_path) -> Lesson:
    """A copy of the toy lesson with both notebooks, and with an asset, config.json."""
    shutil.copytree(built_once.root, tmp_path / "built")
    return Lesson(tmp_path / "built", built_once.name)


@pytest.fixture
def edit():
    """edit(lesson, old, new): replace a text that stands once in the lesson's source."""

    def replace(lesson: Lesson, old: str, new: str) -> None:
        text = lesson.source.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in the toy lesson")
        lesson.source.write_text(text.replace(old, new))

    return replace
