"""Exercises, checks and hints. A check cell calls `check`; `exercise` says what an exercise is."""

from course_lib.checks.checking import check

__all__ = ["check"]
