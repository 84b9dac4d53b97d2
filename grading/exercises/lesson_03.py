"""Lesson 03, The communication ledger: rings on send and recv, their bytes, and their time.

An exercise about a ring that runs on ranks has a file of its own; the others have one for each
question: how many bytes, how long, how fast?
"""

from grading.exercises.ring_all_gather import ALL_GATHER
from grading.exercises.ring_bandwidth import BUSBW, PRICE
from grading.exercises.ring_bytes import BYTES
from grading.exercises.ring_exchange import EXCHANGE
from grading.exercises.ring_reduce_scatter import REDUCE_SCATTER
from grading.exercises.ring_time import LATENCY, TIME

EXERCISES = (BYTES, EXCHANGE, REDUCE_SCATTER, ALL_GATHER, TIME, LATENCY, PRICE, BUSBW)
