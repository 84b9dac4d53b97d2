"""Measure what is really there: live bytes, and receipts that lay them beside the ledger.

`model_state_bytes` counts what a job holds now, `LiveBytes` follows it through a step, and
`predicted_peak` says what it will hold at most, from one process's `work`.
"""

from course_lib.ledger.peak import Peak, predicted_peak
from course_lib.ledger.work import Event
from course_lib.measure.live import model_state_bytes, storage_bytes
from course_lib.measure.receipt import Receipt, receipt
from course_lib.measure.tracker import LiveBytes, Moment
from course_lib.measure.work import work

__all__ = [
    "Event",
    "LiveBytes",
    "Moment",
    "Peak",
    "Receipt",
    "model_state_bytes",
    "predicted_peak",
    "receipt",
    "storage_bytes",
    "work",
]
