"""A job's memory, in bytes per rank, from arithmetic alone.

    model_states(model, recipe, strategy)     parameters, gradients, optimizer states
    buffers(model, recipe, strategy)          what is gathered and reduced, at most at once

give a Ledger, which draws itself, and

    peak(model, recipe, strategy, execution)  the most that is there at once in a step

a Peak; `timeline` has one for each event of the step. `palette` has the colours that the whole
course uses.
"""

from course_lib.ledger.buffers import buffers
from course_lib.ledger.execution import CPU, CUDA, Execution
from course_lib.ledger.ledger import Ledger, Line
from course_lib.ledger.palette import CATEGORIES, COLOURS, LABELS
from course_lib.ledger.peak import peak, predicted_peak, timeline
from course_lib.ledger.published import zero_table1
from course_lib.ledger.replay import Peak
from course_lib.ledger.states import model_states
from course_lib.ledger.tuning import Tuning
from course_lib.specs.units import gb, gib, human

__all__ = [
    "CATEGORIES",
    "COLOURS",
    "CPU",
    "CUDA",
    "Execution",
    "LABELS",
    "Ledger",
    "Line",
    "Peak",
    "Tuning",
    "buffers",
    "gb",
    "gib",
    "human",
    "model_states",
    "peak",
    "predicted_peak",
    "timeline",
    "zero_table1",
]
