"""Lesson 09, FSDP tuning: units, prefetch, checkpointing, offload, hybrid sharding, priced.

No exercise needs ranks: each is about an order of events, or a sum of bytes or seconds.
"""

from grading.exercises.tune_checkpoint import CHECKPOINT
from grading.exercises.tune_exposed import EXPOSED
from grading.exercises.tune_hsdp import HSDP
from grading.exercises.tune_offload import OFFLOAD
from grading.exercises.tune_order import ORDER
from grading.exercises.tune_units import UNITS
from grading.exercises.tune_wrap import WRAP

EXERCISES = (UNITS, WRAP, ORDER, EXPOSED, CHECKPOINT, OFFLOAD, HSDP)
