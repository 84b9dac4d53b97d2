"""Lesson 02, Activations and the peak: what is saved, when most is there, what checkpoints buy.

No exercise needs torch: each is a sum of bytes, or the largest of several.
"""

from grading.exercises.act_allocated import ALLOCATED
from grading.exercises.act_block import BLOCK
from grading.exercises.act_checkpoint import CHECKPOINT
from grading.exercises.act_layer import SAVED
from grading.exercises.act_logits import LOGITS
from grading.exercises.act_peak import PEAK

EXERCISES = (SAVED, BLOCK, LOGITS, PEAK, CHECKPOINT, ALLOCATED)
