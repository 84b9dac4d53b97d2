"""Measure what is really there: live bytes, and receipts that lay them beside the ledger.

`model_state_bytes` counts what a job holds now, `LiveBytes` follows it through a step.
"""

from course_lib.measure.live import model_state_bytes, storage_bytes
from course_lib.measure.receipt import Receipt, receipt
from course_lib.measure.tracker import LiveBytes, Moment

__all__ = ["LiveBytes", "Moment", "Receipt", "model_state_bytes", "receipt", "storage_bytes"]
