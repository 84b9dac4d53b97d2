"""The timeline of a collective log: lanes, bars, and the same in words."""

import pytest
import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.errors import CourseError
from course_lib.figures import timeline as module
from course_lib.figures.image import new_figure
from course_lib.figures.timeline import draw, timeline, tracks
from course_lib.ranks.log import CollectiveLog, Entry


def entry(rank, kind, start, end, elements=4):
    return Entry(rank, kind, elements, "float32", 4, "0", (0, 1), 1, None, None, start, end)


LOG = CollectiveLog(
    [
        [
            entry(0, "all_reduce", 1.0, 1.2),
            entry(0, "all_reduce", 1.1, 1.3),
            entry(0, "all_gather", 1.3, 1.4),
        ],
        [entry(1, "all_reduce", 1.05, 1.25), entry(1, "all_gather", 1.3, None)],
    ]
)


def test_what_overlaps_lies_in_tracks_one_above_the_other():
    rank_0, rank_1 = map(tracks, LOG)
    assert [[e.start for e in track] for track in rank_0] == [[1.0, 1.3], [1.1]]
    assert [[e.start for e in track] for track in rank_1] == [[1.05, 1.3]]


def test_nothing_follows_what_never_ended_in_its_track():
    assert len(tracks([entry(0, "send", 0.0, None), entry(0, "send", 1.0, 2.0)])) == 2


def test_a_bar_reaches_from_start_to_end_in_milliseconds_and_an_open_one_to_the_edge():
    axes = new_figure().add_subplot()
    draw(axes, LOG)
    bars = sorted((b.get_y(), b.get_x(), b.get_width()) for b in axes.patches)
    spans = [(round(x), round(x + width)) for _, x, width in bars]
    assert spans == [(0, 200), (300, 400), (100, 300), (50, 250), (300, 400)]
    (opened,) = [bar for bar in axes.patches if not bar.get_fill()]
    assert opened.get_linestyle() == "--" and round(opened.get_x()) == 300
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # rank 0 on top


def test_kinds_are_told_apart_by_more_than_hue():
    from matplotlib.colors import to_rgb

    def look(kind):
        face, _, hatch = module.FACES.get(kind, module.OTHER)
        grey = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), to_rgb(face), strict=True))
        return grey, hatch

    kinds = (*module.FACES, "barrier")
    for i, one in enumerate(kinds):
        for other in kinds[:i]:
            (grey_1, hatch_1), (grey_2, hatch_2) = look(one), look(other)
            assert hatch_1 != hatch_2 or abs(grey_1 - grey_2) > 0.1, (one, other)


def test_the_table_and_the_text_say_the_same():
    drawn = timeline(LOG)
    html, text = drawn._repr_html_(), repr(drawn)
    assert "Timeline of 2 ranks over 400.0 ms" in html and "2 all_reduce, 1 all_gather" in html
    cells = ("0", "all_reduce", "2", "32", "0.00 ms", "300.00 ms", "200.00 ms")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in html
    assert " ".join(cells) in " ".join(text.split())
    assert "1, 1 never done" in html and "1, 1 never done" in text


@pytest.mark.parametrize("log", [CollectiveLog([]), CollectiveLog([[], []]), [[]], None])
def test_a_log_without_collectives_is_refused(log):
    with pytest.raises(CourseError, match="no collective to draw"):
        timeline(log)


def two_collectives():
    if dist.get_rank() < 3:  # a lane may be empty
        group = dist.new_group([0, 1, 2])
        dist.all_reduce(torch.ones(8), group=group)
    else:
        dist.new_group([0, 1, 2])


def test_a_real_log_is_drawn():
    drawn = timeline(ranks.run(two_collectives, world_size=4).log)
    assert [row.kind for row in module.table(drawn.log)][:3] == ["all_reduce"] * 3
    assert "rank 3 issued nothing" in drawn._repr_html_()
