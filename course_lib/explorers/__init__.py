"""Explorers: a few sliders over a pure function. `base` says how one is made."""

from course_lib.explorers.memory import memory_ledger

__all__ = ["memory_ledger"]
