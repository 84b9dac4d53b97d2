"""Lesson 06, ZeRO-2: gradients reduced to their owners, freed, accumulated; the price of it.

Three exercises run on ranks (`zero2_on_ranks` says what is measured there), two are arithmetic.
"""

from grading.exercises.zero2_accumulate import ACCUMULATE
from grading.exercises.zero2_choose import CHOOSE
from grading.exercises.zero2_free import FREE
from grading.exercises.zero2_reduce import REDUCE
from grading.exercises.zero2_volume import VOLUME

EXERCISES = (REDUCE, FREE, ACCUMULATE, VOLUME, CHOOSE)
