"""Pictures: what the bars show, and that every image speaks."""

import base64
import re

import pytest

from course_lib.figures.bars import GIB, StackedBars
from course_lib.figures.image import image_html, new_figure

CATEGORIES = ("parameters", "gradients")


@pytest.fixture
def drawn():
    figure = new_figure()
    axes = figure.add_subplot()
    return figure, axes, StackedBars(axes, ("ddp", "zero1"), CATEGORIES)


def widths(bars):
    return {
        category: [round(patch.get_width(), 6) for patch in segments]
        for category, segments in bars._segments.items()
    }


def test_an_update_moves_the_same_artists(drawn):
    _, axes, bars = drawn
    artists = len(axes.get_children())
    bars.update([{"parameters": 2 * GIB, "gradients": GIB}, {"parameters": GIB}], 0, 4 * GIB, "gpu")
    assert widths(bars) == {"parameters": [2, 1], "gradients": [1, 0]}
    bars.update([{"parameters": GIB}, {}], 1, 4 * GIB, "gpu")
    assert widths(bars) == {"parameters": [1, 0], "gradients": [0, 0]}
    assert len(axes.get_children()) == artists


def test_segments_are_stacked_and_the_line_is_the_capacity(drawn):
    _, _, bars = drawn
    bars.update([{"parameters": 2 * GIB, "gradients": GIB}, {}], 0, 5 * GIB, "gpu")
    assert bars._segments["gradients"][0].get_x() == 2
    assert list(bars._capacity.get_xdata()) == [5, 5]
    assert [text.get_text() for text in bars._totals] == ["3.0", "nothing to shard"]


def test_an_image_has_alternative_text_and_the_same_bytes_each_time(drawn):
    figure, _, bars = drawn
    bars.update([{"parameters": GIB}, {}], 0, GIB, "gpu")
    first, again = (image_html(figure, 'one "GiB"') for _ in range(2))
    assert first == again and 'alt="one &quot;GiB&quot;"' in first
    svg = base64.b64decode(re.search(r"base64,([^\"]+)", first)[1]).decode()
    assert "GiB on each rank" in svg and "parameters" in svg


def test_an_image_without_alternative_text_is_refused():
    with pytest.raises(ValueError, match="alternative text"):
        image_html(new_figure(), " ")
