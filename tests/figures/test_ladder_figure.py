"""The measured ladder: its panels, its table, its words, and what it refuses."""

import re
from dataclasses import replace

import pytest

from course_lib.errors import CourseError
from course_lib.figures.image import new_figure
from course_lib.figures.ladder import Panels, Rung, duration, ladder, words
from course_lib.ledger import COLOURS

MIB = 2**20
DDP = Rung("ddp", 8 * MIB, 8 * MIB, 16 * MIB, 40 * MIB, moved=12 * MIB, seconds=0.25)
ZERO3 = Rung("zero3", 2 * MIB, 2 * MIB, 4 * MIB, 18 * MIB, moved=18 * MIB, seconds=0.5)


@pytest.fixture
def panels():
    return Panels(new_figure(), ("ddp", "zero3"), "a step takes")


def test_a_row_shows_what_is_held_moved_and_taken(panels):
    panels.update((DDP, ZERO3))
    ends = {"parameters": [8, 2], "gradients": [16, 4], "optimizer_states": [32, 8]}
    for category, bars in panels._stacks.items():
        assert [(bar.get_x() + bar.get_width()) / MIB for bar in bars] == ends[category]
    moved, seconds = ([bar.get_width() for bar in bars] for bars in panels._others)
    assert moved == [12 * MIB, 18 * MIB] and seconds == [0.25, 0.5]
    assert [mark.get_xdata()[-1] / MIB for mark in panels._peaks] == [40, 18]
    told = [[number.get_text() for number in numbers] for numbers in panels._numbers]
    assert told == [
        ["32.0, peak 40.0 MiB", "8.00, peak 18.0 MiB"],
        ["12.0 MiB", "18.0 MiB"],
        ["250 ms", "500 ms"],
    ]


def test_every_bar_and_its_number_stay_within_their_panel(panels):
    long = replace(DDP, peak=1023 * MIB, optimizer_states=1000 * MIB, moved=1023 * MIB)
    panels.update((long, ZERO3), 0, ("gpu", 100 * MIB))
    figure = panels._axes[0].figure
    figure.canvas.draw()
    edges = [axes.get_window_extent().x1 for axes in panels._axes]
    for numbers, edge in zip(panels._numbers, edges, strict=True):
        assert all(number.get_window_extent().x1 <= edge for number in numbers)
    panels.update((DDP, ZERO3), capacity=("gpu", 100 * MIB))
    assert panels._axes[0].get_xlim()[1] > 100 * MIB


def test_an_update_moves_the_same_artists(panels):
    artists = [len(axes.get_children()) for axes in panels._axes]
    panels.update((DDP, ZERO3), chosen=1, capacity=("gpu", 20 * MIB))
    assert panels._frame.get_visible() and panels._frame.get_width() == ZERO3.held
    assert [number.get_fontweight() for number in panels._numbers[1]] == ["normal", "bold"]
    assert list(panels._capacity.get_xdata()) == [20 * MIB] * 2
    panels.update((ZERO3, replace(DDP, peak=None)))
    assert not panels._frame.get_visible() and not panels._capacity.get_visible()
    assert len(panels._peaks[0].get_xdata()) and not len(panels._peaks[1].get_xdata())
    assert [len(axes.get_children()) for axes in panels._axes] == artists


def test_categories_have_the_courses_colours_and_are_told_apart_without_them(panels):
    from matplotlib.colors import to_hex

    looks = {name: bars[0] for name, bars in panels._stacks.items()}
    assert all(to_hex(bar.get_facecolor()).upper() == COLOURS[name] for name, bar in looks.items())
    assert len({bar.get_hatch() for bar in looks.values()}) == len(looks) == 3


def test_where_nothing_moves_there_are_no_bars(panels):
    alone = replace(DDP, moved=0, seconds=0.0)
    panels.update((alone, alone))
    assert [numbers[0].get_text() for numbers in panels._numbers[1:]] == ["0 B", "0 µs"]


def test_the_table_is_the_same_in_a_notebook_and_in_a_terminal():
    made = ladder([DDP, ZERO3])
    html = made._repr_html_()
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    shown = [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in rows]
    printed = [re.split(r"  +", line.strip()) for line in repr(made).splitlines()]
    assert shown == printed
    *held, together, peak, moved, seconds = printed[1][1:]
    assert held == ["8.00 MiB", "8.00 MiB", "16.00 MiB"]
    assert (together, peak, moved, seconds) == ("32.00 MiB", "40.00 MiB", "12.00 MiB", "250 ms")


def test_the_picture_speaks():
    alt = re.search(r'alt="([^"]+)"', ladder([DDP, ZERO3])._repr_html_())[1]
    assert alt == words((DDP, ZERO3))
    assert "zero3 8.00 MiB (peak 18.00 MiB)" in alt and "zero3 500 ms" in alt


def test_a_peak_that_nobody_knows_is_left_out():
    unknown = [replace(rung, peak=None) for rung in (DDP, ZERO3)]
    assert "peak" not in repr(ladder(unknown)) and "peak" not in words(unknown)
    half_known = repr(ladder([DDP, unknown[1]])).splitlines()
    assert "peak" in half_known[0] and len(half_known[1]) == len(half_known[2])


def test_a_name_from_outside_is_escaped():
    html = ladder([replace(DDP, name="<b>")])._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;" in html


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(3.4e-6, "3.40 µs"), (0.0123, "12.3 ms"), (2.5, "2.50 s"), (0, "0 µs"), (1234.0, "1,234 s")],
)
def test_durations_have_three_digits_and_a_unit(seconds, told):
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"gradients": -1}, "gradients of ddp is -1"),
        ({"moved": 1.5}, "moved of ddp is 1.5"),
        ({"peak": "much"}, "peak of ddp is 'much'"),
        ({"seconds": float("nan")}, "seconds of ddp is nan: give the time of a step"),
    ],
)
def test_what_is_no_measurement_is_refused(wrong, told):
    with pytest.raises(CourseError, match=told):
        replace(DDP, **wrong)


def test_a_ladder_has_rungs():
    with pytest.raises(CourseError, match="no rung to draw: give a list of Rung"):
        ladder([])
