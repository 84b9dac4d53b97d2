"""The life-cycle viewer without a browser: what its controls change, and what it refuses."""

import re

import pytest

from course_lib import explorers
from course_lib.errors import CourseError
from course_lib.sharded.fsdp_events import Event


def events(rank=0, steps=3):
    made = []
    for i in range(steps):
        t = 0.01 * i + 0.001 * rank
        made += [
            Event("all_gather", "layers.0", 4096, t, t + 0.002, "gathering", 4096),
            Event("wait", "layers.0", 0, t, t + 0.002, "gathering", 4096),
            Event("copy out", "layers.0", 4096, t + 0.002, t + 0.003, "whole", 4096),
            Event("forward", "layers.0", 0, t + 0.003, t + 0.008, "whole", 4096),
            Event("reshard", "layers.0", 4096, t + 0.008, t + 0.008, "sharded", 0),
        ]
    return made


def test_a_step_moves_the_marks_and_leaves_the_picture():
    viewer = explorers.life_cycle([events()])
    picture, now = viewer._picture.value, viewer._now.value
    viewer.controls["event"].value = 3
    assert viewer._picture.value == picture and viewer._now.value != now
    assert "Event 3 of 15, at 3.00 ms: copy out." in viewer.html and "whole" in viewer._now.value
    back, on = (box for box in viewer.children[0].children if hasattr(box, "on_click"))
    on.click()
    assert viewer.controls["event"].value == 4 and "computed its forward" in viewer.html
    back.click()
    back.click()
    assert viewer.controls["event"].value == 2 and "Compute stood still for 2.00 ms" in viewer.html


def test_it_shows_each_rank_of_each_recording():
    theirs = [events(rank, steps=2) for rank in range(2)]
    viewer = explorers.life_cycle({"ours": [events(), events(1)], "theirs": theirs}, event=12)
    assert viewer.controls["event"].value == 12
    first = viewer._picture.value
    viewer.controls["rank"].value = 1
    assert viewer._picture.value != first and "rank 1 of ours" in viewer.html
    viewer.controls["recording"].value = "theirs"
    assert viewer.controls["event"].max == 10 == viewer.controls["event"].value
    assert "rank 1 of theirs" in viewer.html and "Event 10 of 10" in viewer.html
    viewer.controls["recording"].value, viewer.controls["rank"].value = "ours", 0
    assert viewer._picture.value == first


def test_the_stored_output_reads_without_a_kernel():
    bundle = explorers.life_cycle({"ours": [events()]}, event=3)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    page = bundle["text/html"]
    assert "recording ours · rank 0 · event 3" in page
    assert re.search(r'<img [^>]*alt="Timeline of rank 0 of ours', page) and "<table>" in page
    assert "at most 4.00 KiB" in page


@pytest.mark.parametrize(
    ("recordings", "said"),
    [
        ({}, "no recording"),
        ([], "has no ranks"),
        ({"ours": [events(), []]}, "'ours' has no event of rank 1"),
        (events(), "a list of events was expected for each rank"),
        ([["all_gather"]], "a list of events was expected for each rank"),
    ],
)
def test_what_is_no_recording_is_refused(recordings, said):
    with pytest.raises(CourseError, match=said):
        explorers.life_cycle(recordings)


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(CourseError, match="rank is 2, and the recordings have ranks 0 to 1"):
        explorers.life_cycle([events(), events(1)], rank=2)
