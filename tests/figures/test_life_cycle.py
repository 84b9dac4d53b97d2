"""The life cycle as a picture and in words: order, states, bytes held, what lies where."""

import re

import pytest
from matplotlib.colors import to_rgb

from course_lib.figures import life_cycle as figure
from course_lib.figures import life_cycle_story as story
from course_lib.figures.life_cycle import picture
from course_lib.figures.life_cycle_story import Story
from course_lib.sharded import fsdp_events, fsdp_unit
from course_lib.sharded.fsdp_events import Event

KIB = 2**10


def event(kind, unit, start, end, state, held=0, nbytes=0):
    return Event(kind, unit, nbytes, start / 1e3, None if end is None else end / 1e3, state, held)


EVENTS = [  # root around one block, in ms
    event("all_gather", "", 0, 2, "gathering", 4 * KIB, 4 * KIB),
    event("wait", "", 0, 2, "gathering", 4 * KIB),
    event("copy out", "", 2, 3, "whole", 4 * KIB, 4 * KIB),
    event("forward", "", 3, 9, "whole", 4 * KIB),
    event("all_gather", "layers.0", 3, 5, "gathering", 6 * KIB, 6 * KIB),
    event("wait", "layers.0", 4, 5, "gathering", 6 * KIB),
    event("copy out", "layers.0", 5, 6, "whole", 6 * KIB, 6 * KIB),
    event("forward", "layers.0", 6, 8, "whole", 6 * KIB),
    event("reshard", "layers.0", 8, 8, "resharded", 3 * KIB, 3 * KIB),
    event("reduce_scatter", "", 9, None, "sharded", 5 * KIB, 4 * KIB),
    event("wait", "", 9, 10, "sharded", 0),
]


def at(kind, unit="", events=EVENTS):
    made = Story(events)
    return [(e.kind, e.unit) for e in made.events].index((kind, unit))


def test_names_are_those_of_the_recording():
    assert story.COMMUNICATION == fsdp_events.COMMUNICATION
    units = (fsdp_unit.SHARDED, fsdp_unit.GATHERING, fsdp_unit.WHOLE, fsdp_unit.RESHARDED)
    assert units == story.STATES
    kinds = {*fsdp_events.COMMUNICATION, *fsdp_events.COMPUTE}
    assert kinds <= {*figure.KINDS, *figure.STROKES} and kinds <= {*story.TOLD, "wait"}


def test_communication_counts_from_its_start_and_compute_from_its_end():
    made = Story(EVENTS)
    order = [(e.kind, e.unit) for e in made.events]
    assert order.index(("all_gather", "layers.0")) < order.index(("wait", "layers.0"))
    assert order.index(("forward", "layers.0")) < order.index(("forward", ""))
    times = [story.counts(e) for e in made.events]
    assert times == sorted(times)


def test_held_is_the_sum_of_the_latest_of_each_unit():
    made = Story(EVENTS)
    assert made.held[at("all_gather", "layers.0")] == 10 * KIB == made.held[made.peak]
    assert made.held[at("reshard", "layers.0")] == 7 * KIB
    assert made.held[-1] == 3 * KIB
    latest = made.latest(at("copy out"))
    assert latest[""].state == "whole" and latest["layers.0"] is None


def test_states_follow_one_another_until_the_end():
    states = Story(EVENTS).states("layers.0")
    assert [(state, round(1e3 * a), round(1e3 * b)) for state, a, b in states] == [
        ("sharded", 0, 3),
        ("gathering", 3, 6),
        ("whole", 6, 8),
        ("resharded", 8, 10),
    ]


def test_the_roots_forward_lies_behind_and_around_that_of_the_block():
    made = picture(Story(EVENTS))
    root, block = (made.box(at("forward", unit)) for unit in ("", "layers.0"))
    assert root[0] < block[0] and root[0] + root[2] > block[0] + block[2]
    assert root[1] < block[1] and root[1] + root[3] > block[1] + block[3]
    assert made.story.outer == {id(EVENTS[3])}
    wait = made.box(at("wait", "layers.0"))
    assert wait[1] == pytest.approx(block[1]) and wait[3] == pytest.approx(block[3])


def test_marks_lie_where_things_were_drawn():
    made = picture(Story(EVENTS), over=0.02, most=20 * KIB)
    left, right = figure.LEFT / figure.WIDTH, 1 - figure.RIGHT / figure.WIDTH
    x, _, width, _ = made.box(at("forward", "layers.0"))
    assert x == pytest.approx(left + (right - left) * 6 / 20)
    assert width == pytest.approx((right - left) * 2 / 20)
    unfinished = made.box(at("reduce_scatter"))
    assert unfinished[2] == pytest.approx((right - left) * 1 / 20)  # until the last thing happened
    tops = [made.box(i)[1] for i in range(len(EVENTS))]
    assert min(tops) > 0 and made.box(at("all_gather"))[1] == min(tops)
    zero, each = made.scale
    assert 0 > each * 20 * KIB > -figure.MEMORY / made.inches[1]  # upwards, within the axes
    assert zero == pytest.approx(1 - figure.BELOW / made.inches[1])
    marks = made.marks(at("forward", "layers.0"))
    assert marks.count("<div") == 4 and f"left:{100 * x:.3f}%" in marks


def test_a_wait_and_the_states_are_told_apart_in_grey():
    def grey(colour):
        weights = (0.2126, 0.7152, 0.0722)
        return sum(w * c for w, c in zip(weights, to_rgb(colour), strict=True))

    looks = {kind: (grey(face), hatch) for kind, (face, _, hatch) in figure.KINDS.items()}
    for kind in ("forward", "backward", "copy out", "copy in"):
        assert looks["wait"][1] != looks[kind][1]
    assert abs(looks["forward"][0] - looks["backward"][0]) > 0.15
    assert abs(looks["all_gather"][0] - looks["reduce_scatter"][0]) > 0.15
    states = list(figure.STATES.values())
    assert len({(hatch, height) for _, _, hatch, height in states}) == len(states)
    assert len(set(figure.CELLS.values())) == len(states)


def test_cells_say_each_units_state_and_bytes():
    cells = picture(Story(EVENTS)).cells(at("copy out"))
    root, block = re.findall(r"<strong>(.+?)</strong> <br>(.+?) <br>(.+?) ?</div>", cells)
    assert root == ("root", "whole", "4.0 KiB") and block == ("layers.0", "sharded", "0 B")
    assert "resharded" in picture(Story(EVENTS)).cells(at("reshard", "layers.0"))


def test_every_kind_has_a_sentence_that_says_what_and_why():
    made = Story(EVENTS)
    said = {(e.kind, e.unit): made.sentence(i) for i, e in enumerate(made.events)}
    assert "layers.0 was needed and its all_gather was not done" in said["wait", "layers.0"]
    assert "stood still for 1.00 ms" in said["wait", "layers.0"]
    assert "until the gradients of root were reduced" in made.sentence(len(EVENTS) - 1)
    outer, near = said["forward", ""], said["reshard", "layers.0"]
    assert outer.startswith("Root has computed") and "inside of it" in outer
    assert "ranks near by" in near and "3.00 KiB" in near
    ready = Story([event("wait", "a", 0, 0.01, "gathering")]).sentence(0)
    assert "was ready" in ready and "exposed" not in ready
    every = [event(kind, "a", 0, 1, "whole", nbytes=KIB) for kind in story.TOLD]
    assert all("a" in Story([e]).sentence(0) and "{" not in Story([e]).sentence(0) for e in every)


def test_units_are_named_as_short_as_they_can_be_told_apart():
    units = ["", "model.layers.0", "model.layers.1.mlp.up"]
    made = Story([event("wait", unit, 0, 1, "sharded") for unit in units])
    assert [made.name(unit) for unit in units] == ["root", "layers.0", "layers.1.mlp.up"]


def test_table_and_text_say_the_same():
    made = Story(EVENTS, "rank 0 of ours")
    table, alt = made.table(), made.alt()
    summary = "Held beyond shards: at most 10.00 KiB, at 3.00 ms, after all_gather of layers.0"
    assert summary in table and summary in alt and "stands still for 4.00 ms" in alt
    assert "Timeline of rank 0 of ours" in alt and "2 forward" in alt and "root, layers.0" in alt
    assert "<td>1 · 2.00 ms · 6.00 KiB</td>" in table and table.count("<tr>") == 4
    assert "<td>2 · 4.00 ms · 10.00 KiB</td>" in table  # together, of all_gather
    assert made.alt().replace("'", "&#x27;") in picture(made).image


def test_many_events_are_drawn_as_pixels_and_few_as_lines():
    few = picture(Story(EVENTS)).image
    many = [
        event("wait", f"layers.{i % 3}", i, i + 1, "gathering", KIB) for i in range(figure.MANY + 1)
    ]
    assert len(picture(Story(many)).image) < 3 * len(few)
    assert len(few) < 80_000


def test_without_styles_the_picture_and_the_cells_words_remain():
    made = picture(Story(EVENTS))
    page = re.sub(r' style="[^"]*"', "", made.with_marks(2))
    assert page.count("<img") == 1 and re.sub(r"<[^>]*>", "", page).strip() == ""
