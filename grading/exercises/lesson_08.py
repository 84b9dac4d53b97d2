"""Lesson 08, the life cycle of FSDP's units: states, rows, the root, dtypes, meta-device init.

Three exercises run on ranks, `life_on_ranks` says what is measured there; four need none.
"""

from grading.exercises.life_cycle import CYCLE
from grading.exercises.life_meta import META
from grading.exercises.life_reduce import REDUCE
from grading.exercises.life_reshard import RESHARD
from grading.exercises.life_rows import ROWS
from grading.exercises.life_units import UNITS
from grading.exercises.life_unshard import UNSHARD

EXERCISES = (ROWS, UNSHARD, UNITS, CYCLE, RESHARD, REDUCE, META)
