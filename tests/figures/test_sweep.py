"""The sweep: exposed time out of a recording, its two panels, its table, and what it refuses."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from course_lib.errors import CourseError
from course_lib.figures.sweep import Setting, lanes, sweep, uncovered

MIB = 2**20
COARSE = Setting("the model", 40 * MIB, 0.5, 0.2, 0.25, predicted=41 * MIB)
FINE = Setting("every Linear", 18 * MIB, 0.75, 0.5, 0.3)


@pytest.mark.parametrize(
    ("spans", "cover", "seconds"),
    [
        ([(0, 4)], [(1, 3)], 2),
        ([(0, 4), (2, 6)], [(3, 5)], 4),  # two at a time count once
        ([(0, 6)], [(1, 4), (2, 3)], 3),  # so does cover within cover
        ([(0, 1), (5, 7)], [(2, 6)], 2),  # a pause is nothing
        ([], [(0, 1)], 0),
        ([(1, 2)], [], 1),
    ],
)
def test_what_is_not_covered(spans, cover, seconds):
    assert uncovered(spans, cover) == seconds


def test_a_rank_that_waits_computes_not():
    def event(kind, start, end):
        return SimpleNamespace(kind=kind, start=start, end=end)

    recorded = [
        event("forward", 0, 10),  # the root's, around all others
        event("all_gather", 1, 4),
        event("wait", 2, 4),
        event("copy out", 4, 5),
        event("forward", 5, 9),
        event("reshard", 9, 9),
        event("reduce_scatter", 8, 12),
        event("wait", 11, 12),
        event("all_reduce", 12, None),  # not done yet
    ]
    sent, computed = lanes(recorded)
    assert uncovered(sent, computed) == 2 + 2  # 2 to 4, and 10 to 12
    assert uncovered(computed, sent) == 1 + 4  # 0 to 1, and 4 to 8


def test_the_table_is_the_same_in_a_notebook_and_in_a_terminal():
    made = sweep("a unit is", [COARSE, FINE], "Bars.")
    rows = re.findall(r"<tr>(.*?)</tr>", made._repr_html_())
    shown = [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in rows]
    assert shown == [re.split(r"  +", line.strip()) for line in repr(made).splitlines()]
    assert shown[1] == ["the model", "40.00 MiB", "41.00 MiB", "500 ms", "200 ms", "250 ms"]
    assert shown[2][:3] == ["every Linear", "18.00 MiB", "–"]


def test_the_picture_speaks():
    alt = re.search(r'alt="([^"]+)"', sweep("a unit is", [COARSE, FINE], "A U.")._repr_html_())[1]
    assert alt.startswith("A U. Where a unit is: the model: peak 40.00 MiB, step 500 ms")
    assert "of it 500 ms exposed" in alt


def test_what_cannot_be_is_refused():
    with pytest.raises(CourseError, match="nothing to draw"):
        sweep("a unit is", [], "Bars.")
    with pytest.raises(CourseError, match="every Linear: 0.8 of 0.75 seconds are exposed"):
        sweep("a unit is", [COARSE, replace(FINE, exposed=0.8)], "Bars.")
    assert "&lt;b&gt;" in sweep("x", [replace(FINE, name="<b>")], "Bars.")._repr_html_()
