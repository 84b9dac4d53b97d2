"""Measure what is really there: live bytes, and receipts that lay them beside the ledger."""

from course_lib.measure.live import model_state_bytes, storage_bytes
from course_lib.measure.receipt import Receipt, receipt

__all__ = ["Receipt", "model_state_bytes", "receipt", "storage_bytes"]
