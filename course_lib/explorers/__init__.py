"""Explorers: a few sliders over a pure function. `base` says how one is made."""

from course_lib.explorers.buckets import bucket_overlap
from course_lib.explorers.ladder import ladder
from course_lib.explorers.life_cycle import life_cycle
from course_lib.explorers.memory import memory_ledger
from course_lib.explorers.network import network_price
from course_lib.explorers.step_memory import step_memory

__all__ = [
    "bucket_overlap",
    "ladder",
    "life_cycle",
    "memory_ledger",
    "network_price",
    "step_memory",
]
