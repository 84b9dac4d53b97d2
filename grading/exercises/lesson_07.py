"""Lesson 07, ZeRO-3: parameters gathered before use and freed after; what it costs and saves.

Two exercises run on ranks (`zero3_on_ranks` says what is measured there), three need none.
"""

from grading.exercises.zero3_backward import BACKWARD
from grading.exercises.zero3_gather import GATHER
from grading.exercises.zero3_tied import TIED
from grading.exercises.zero3_transient import TRANSIENT
from grading.exercises.zero3_volume import VOLUME

EXERCISES = (TRANSIENT, GATHER, BACKWARD, VOLUME, TIED)
