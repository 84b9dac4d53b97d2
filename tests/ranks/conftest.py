"""Every test here has a time in which it must end, and leaves no process behind."""

import contextlib
import signal
from collections.abc import Iterator

import psutil
import pytest

from course_lib import ranks

LIMIT = 120  # seconds: a generous margin over any deadline a test sets


@contextlib.contextmanager
def must_end_within(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not over within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True)
def ends_and_leaves_nothing() -> Iterator[None]:
    ranks.warm_up()
    before = children()
    with must_end_within(LIMIT):
        yield
    assert children() <= before
