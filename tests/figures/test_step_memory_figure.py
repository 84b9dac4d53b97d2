"""The figure of a step's memory: what thinning keeps, how wide phases are, what is drawn where."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from course_lib.figures.image import new_figure
from course_lib.figures.step_memory import (
    LEAST,
    NARROWEST,
    POINTS,
    Phase,
    StepMemory,
    thinned,
    total,
    widths,
)
from course_lib.ledger import COLOURS

GIB = 2**30
PHASES = (
    Phase("forward", tuple({"parameters": GIB, "activations": i * GIB} for i in range(6))),
    Phase("loss", ({"parameters": GIB, "activations": 5 * GIB, "logits": 4 * GIB},)),
    Phase("backward", tuple({"parameters": GIB, "activations": i * GIB} for i in range(7, 1, -1))),
    Phase("step", ({"parameters": GIB, "other": 2 * GIB},)),
)


@pytest.fixture
def axes():
    return new_figure().add_subplot()


def shown(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_thinning_keeps_the_peak_the_order_and_each_phases_most():
    long = [{"activations": (i * 7919) % 1000} for i in range(5_000)]
    long[4_321] = {"activations": 2_000, "gradients": 1}
    phases = [Phase("forward", tuple(long)), Phase("step", ({"other": 7},))]
    thin = thinned(phases)
    assert len(thin[0].moments) <= POINTS and long[4_321] in thin[0].moments
    assert [phase.most for phase in thin] == [phase.most for phase in phases] == [2_001, 7]
    places = [next(i for i, one in enumerate(long) if one is kept) for kept in thin[0].moments]
    assert places == sorted(places)
    assert thinned(PHASES) == list(PHASES)


def test_a_short_phase_stays_whole_beside_a_long_one():
    long = tuple({"other": i} for i in range(10_000))
    short, thin = thinned([Phase("forward", long[:LEAST]), Phase("backward", long)])
    assert short.moments == long[:LEAST] and len(thin.moments) <= POINTS


def test_a_phase_is_as_wide_as_its_moments_are_many_but_can_be_seen():
    sizes = (30, 1, 168, 1)
    phases = [Phase("", ({},) * size) for size in sizes]
    forward, loss, backward, step = widths(phases)
    assert loss == step == NARROWEST
    assert backward / forward == pytest.approx(168 / 30)
    assert sum(widths(phases)) == pytest.approx(1)
    assert widths(phases[:1]) == [1]


def test_areas_are_stacked_in_the_courses_order_and_colours(axes):
    picture = StepMemory(axes)
    picture.update(PHASES, "the peak", "a gpu", 12 * GIB)
    drawn = {name: area.get_paths() for name, area in picture._areas.items()}
    assert {name for name, paths in drawn.items() if paths} == {
        *("parameters", "activations", "logits", "other")
    }
    behind = [area.get_zorder() for area in picture._areas.values()]
    assert behind == sorted(behind, reverse=True)
    for name, area in picture._areas.items():
        assert to_hex(area.get_facecolor()[0]).upper() == COLOURS[name]
    assert drawn["parameters"][0].vertices[:, 1].max() == 1  # GiB, the lowest
    assert drawn["activations"][0].vertices[:, 1].max() == 8
    tops = drawn["logits"][0].vertices
    assert tops[:, 1].max() == max(map(total, PHASES[1].moments)) / GIB == 10
    loss = tops[tops[:, 1] == 10][:, 0]
    forward, wide, *_ = widths(PHASES)
    assert (loss.min(), loss.max()) == pytest.approx((forward, forward + wide))


def test_the_peak_is_marked_where_it_is_and_capacity_is_a_line(axes):
    picture = StepMemory(axes)
    for room in (12, 6):
        picture.update(PHASES, "10.0 GiB in the loss", "a gpu", room * GIB)
        x, y = np.array(picture._mark.get_data()).ravel()
        forward, loss, *_ = widths(PHASES)
        assert forward < x < forward + loss and y == 10
        assert all(list(line.get_ydata()) == [room, room] for line in picture._capacity)
        assert axes.get_ylim()[1] > max(10, room)
        assert {"10.0 GiB in the loss", "a gpu"} <= set(shown(axes))


@pytest.mark.parametrize("most", range(1, 14))
@pytest.mark.parametrize("room", [9.8, 10.2, 12])
def test_names_stay_within_the_picture_and_apart(axes, most, room):
    """Wherever the peak is, and however near the capacity."""
    moments = tuple({"other": GIB * (10 if i == most else 1)} for i in range(14))
    phases = (Phase("forward", moments[:5]), Phase("backward", moments[5:]))
    picture = StepMemory(axes)
    picture.update(phases, "10.0 GiB in backward of layer 124", "h100-sxm-80: 80 GiB", room * GIB)
    axes.figure.canvas.draw()
    peak, capacity = (
        text.get_window_extent() for text in (picture._peak_name, picture._capacity_name)
    )
    assert not peak.overlaps(capacity)
    whole = axes.figure.bbox
    assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 for box in (peak, capacity))
    assert peak.y1 <= whole.y1
    line = axes.transData.transform((0, room))[1]
    assert not peak.y0 < line < peak.y1


def test_a_capacity_far_above_is_told_and_leaves_the_picture_its_room(axes):
    picture = StepMemory(axes)
    picture.update(PHASES, "the peak", "a gpu", 80 * GIB)
    assert axes.get_ylim()[1] < 20 and "a gpu, far above ↑" in shown(axes)
    assert not any(line.get_visible() for line in picture._capacity)
    picture.update(PHASES, "the peak", "a gpu", 30 * GIB)
    assert axes.get_ylim()[1] > 30 and all(line.get_visible() for line in picture._capacity)


def test_an_update_moves_the_same_artists_and_tells_phases_below_the_axis(axes):
    picture = StepMemory(axes)
    picture.update(PHASES, "the peak", "a gpu", 12 * GIB)
    artists = len(axes.get_children())
    named = ["forward\n6.0", "loss\n10.0", "backward\n8.0", "step\n3.0"]
    assert [text for text in shown(axes) if "\n" in text] == named
    picture.update(PHASES[:2], "the peak", "a gpu", 12 * GIB)
    assert [text for text in shown(axes) if "\n" in text] == named[:2]
    assert len(axes.get_children()) == artists
