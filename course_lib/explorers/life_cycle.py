"""The life-cycle viewer: the events of a real run, rank by rank, to be stepped through.

It is an explorer whose picture is drawn once for each rank; a step moves the marks on it, and says
what happened, in which state each unit is, and what is held. See `figures.life_cycle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import ipywidgets as widgets

from course_lib.errors import CourseError
from course_lib.explorers.base import Shown
from course_lib.figures.life_cycle import Picture, picture
from course_lib.figures.life_cycle_story import Story, counts, ms
from course_lib.specs import human

if TYPE_CHECKING:
    from course_lib.sharded.fsdp_events import Event

    Recording = Sequence[Sequence[Event]]  # the events of each rank

ONLY = "this run"  # the name of a recording that was given without one


class LifeCycle(Shown):
    """Shows one event of one rank of one recording, and where it stands among the others."""

    def __init__(self, stories: Mapping[str, Sequence[Story]], controls, steps):
        self.controls, self._stories = controls, stories
        self._pictures: dict[Story, Picture] = {}
        self._most = max(max(s.held) for recording in stories.values() for s in recording)
        self._picture, self._now, self._table = (widgets.HTML() for _ in range(3))
        for each in (controls["recording"], controls["rank"]):
            each.observe(self._turn_to_a_rank, names="value")
        controls["event"].observe(self._move, names="value")
        self._turn_to_a_rank()
        for each in (self._picture, self._now):
            each.layout.grid_area = "one"  # one upon the other, from the same corner
        upon = widgets.GridBox([self._picture, self._now], layout={"grid_template_areas": '"one"'})
        row = {"flex_flow": "row wrap"}
        choices = [
            controls[name] for name in ("recording", "rank") if len(controls[name].options) > 1
        ]
        stepping = widgets.HBox([controls["event"], *steps], layout=row)
        choosing = [widgets.HBox(choices, layout=row)] if choices else []
        super().__init__([*choosing, stepping, upon, self._table])

    @property
    def story(self) -> Story:
        return self._stories[self.controls["recording"].value][self.controls["rank"].value]

    @property
    def picture(self) -> Picture:
        """Of all ranks of a recording on one clock, and of all recordings on one scale of bytes."""
        story = self.story
        if story not in self._pictures:
            over = max(other.over for other in self._stories[self.controls["recording"].value])
            self._pictures[story] = picture(story, over, self._most)
        return self._pictures[story]

    @property
    def html(self) -> str:
        index = self.controls["event"].value - 1
        return self.picture.with_marks(index) + self._told(index) + self._table.value

    def _turn_to_a_rank(self, _change=None) -> None:
        self.controls["event"].max = len(self.story.events)
        # A layer of its own: the browser need not paint it again when marks move.
        self._picture.value = f'<div style="will-change:transform">{self.picture.image}</div>'
        self._table.value = self.story.table()
        self._move()

    def _move(self, _change=None) -> None:
        index = self.controls["event"].value - 1
        self._now.value = self.picture.marks(index) + self._told(index)  # one message for each step

    def _told(self, index: int) -> str:
        return tell(self.story, index) + self.picture.cells(index)


def tell(story: Story, index: int) -> str:
    """HTML: which event it is, what happened and why, and what is held."""
    event = story.events[index]
    held, own = story.held[index], event.held
    which = f"Event {index + 1:,} of {len(story.events):,}, at {ms(counts(event))}: {event.kind}."
    told = f"Held beyond shards: {human(held)}, of which {story.name(event.unit)} has {human(own)}."
    style = "min-height:4.2em;max-width:60em;margin:0;line-height:1.4"
    what = f"{escape(story.sentence(index))} {escape(told)}"
    return f'<p style="{style}"><strong>{escape(which)}</strong> {what}</p>'


def life_cycle(
    recordings: Mapping[str, Recording] | Recording, rank: int = 0, event: int = 1
) -> LifeCycle:
    """The viewer of `recordings`, starting with `rank` of the first and its `event`-th event.

    A recording is a list of events for each rank, from fsdp.recording() or recording_fully_shard,
    as ranks.run returns them. Give one, or several by name, of as many ranks each.

    Errors: CourseError where there is no event, or no such rank.
    """
    named = recordings if isinstance(recordings, Mapping) else {ONLY: recordings}
    if not named:
        raise CourseError("life_cycle was given no recording: give at least one, by its name.")
    stories = {name: _stories(name, recording) for name, recording in named.items()}
    ranks = min(map(len, stories.values()))
    if rank not in range(ranks):
        raise CourseError(f"rank is {rank!r}, and the recordings have ranks 0 to {ranks - 1}.")
    wide = {"style": {"description_width": "5em"}}
    slider = widgets.IntSlider(event, 1, 10**9, description="event", **wide)
    slider.layout.width = "34em"
    controls = {
        "recording": widgets.Dropdown(options=list(named), description="recording", **wide),
        "rank": widgets.Dropdown(options=range(ranks), value=rank, description="rank", **wide),
        "event": slider,
    }
    return LifeCycle(stories, controls, _steps(slider))


def _steps(slider: widgets.IntSlider) -> list[widgets.Widget]:
    """Buttons for a step back and a step on, and one that plays."""
    back, on = (
        widgets.Button(icon=f"step-{to}", tooltip=f"one event {to}", layout={"width": "3em"})
        for to in ("backward", "forward")
    )
    back.on_click(lambda _: setattr(slider, "value", slider.value - 1))
    on.on_click(lambda _: setattr(slider, "value", slider.value + 1))
    play = widgets.Play(value=slider.value, min=1, max=slider.max, interval=400, show_repeat=False)
    for name in ("max", "value"):  # in the browser; at first play gets what the slider has
        widgets.jslink((slider, name), (play, name))
    return [back, on, play]


def _stories(name: str, recording: Recording) -> list[Story]:
    from course_lib.sharded.fsdp_events import Event  # loads torch

    events = [list(of_rank) if isinstance(of_rank, Sequence) else of_rank for of_rank in recording]
    for rank, of_rank in enumerate(events):
        if not isinstance(of_rank, list) or not all(isinstance(e, Event) for e in of_rank):
            raise CourseError(
                f"In the recording {name!r} rank {rank} has {type(recording[rank]).__name__}, and "
                "a list of events was expected for each rank: give what ranks.run returned."
            )
        if not of_rank:
            raise CourseError(
                f"The recording {name!r} has no event of rank {rank}: run forward and backward "
                "while it records."
            )
    if not events:
        raise CourseError(f"The recording {name!r} has no ranks: give what ranks.run returned.")
    return [Story(of_rank, f"rank {rank} of {name}") for rank, of_rank in enumerate(events)]
