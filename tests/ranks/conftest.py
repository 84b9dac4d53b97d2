"""Every test here has a time in which it must end, and leaves no process behind."""

from collections.abc import Iterator

import psutil
import pytest
from limits import must_end_within

from course_lib import ranks

LIMIT = 120  # seconds: a generous margin over any deadline a test sets


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True)
def ends_and_leaves_nothing() -> Iterator[None]:
    ranks.warm_up()
    before = children()
    with must_end_within(LIMIT):
        yield
    assert children() <= before
