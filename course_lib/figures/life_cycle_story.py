"""A recording of FSDP's events on one rank, put in order, and told in words.

An event counts, for states and bytes, from when it began if it is communication, else from when it
ended. In this order a `Story` has them, and says after each what its unit is and what is held: of
each unit the last event that counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from course_lib.figures.ladder import duration
from course_lib.specs import human

if TYPE_CHECKING:
    from course_lib.sharded.fsdp_events import Event  # loads torch, which explorers do without

COMMUNICATION = ("all_gather", "reduce_scatter", "all_reduce")
SHARDED, GATHERING, WHOLE, RESHARDED = STATES = ("sharded", "gathering", "whole", "resharded")
NESTED = ("forward", "backward")
NO_WAIT = 1e-4  # seconds: below that compute hardly stood still

TOLD = {  # kind: what happened, and why
    "all_gather": "An all_gather began, of all ranks' shards of {unit}: they fill a buffer of "
    "{bytes}, as {unit} is going to be computed with, and for that it must be whole.",
    "copy out": "The parameters of {unit} were copied out of the buffer, {bytes}: in there the "
    "shards of one rank lie side by side, and a module computes with each parameter in one piece.",
    "forward": "{unit} has computed its forward, with whole parameters.",
    "backward": "{unit} has computed its backward, with whole parameters: their gradients are "
    "complete, and can be reduced.",
    "reshard": "{unit} let go of {bytes}, its whole parameters: until it is computed with again, "
    "others need the memory, and this rank keeps its shard.",
    "free": "Buffers of {unit} were let go of, {bytes}: what came in them is now in its whole "
    "parameters, or the gradient of this rank's rows, and nothing reads them any more.",
    "copy in": "The gradients of {unit} were copied into a buffer of {bytes}, in the order of the "
    "ranks that get them, so that one reduce_scatter takes all.",
    "reduce_scatter": "A reduce_scatter began, of the gradients of {unit}, {bytes}: each rank gets "
    "the mean of its own rows, and needs no more, as it updates only these.",
    "all_reduce": "An all_reduce began, of {bytes} of gradients of {unit}: replicas have the same "
    "rows, and must update them alike.",
    "to device": "The shards of {unit} were copied to the device that computes, {bytes}, from the "
    "CPU, where they are at home.",
    "to host": "The reduced gradients of {unit} were copied to the CPU, {bytes}: the optimizer "
    "updates shards there.",
}
NO_TIME = "{unit} was waited for, and was ready: compute hardly stood still. This communication "
NO_TIME += "was hidden."
LATE_PARAMETERS = "Compute stood still for {time}, as {unit} was needed and its all_gather was not "
LATE_PARAMETERS += "done: this communication is exposed."
LATE_GRADIENTS = "Compute stood still for {time}, until the gradients of {unit} were reduced, so "
LATE_GRADIENTS += "that their buffer can be let go of: this communication is exposed."
TO_NEAR = "{unit} let go of {bytes} and kept a part of it, which it shares with the ranks near by: "
TO_NEAR += "to gather it again, only they need to talk."
AROUND = " The units inside of it did so meanwhile."


class Story:
    """The events of one rank, of whom `of` tells, in the order in which they count.

    `over` is when the last thing happened, in seconds; what has no end lasts until then.
    """

    def __init__(self, events: Iterable[Event], of: str = ""):
        self.of, self.events = of, sorted(events, key=counts)
        self.over = max(max(e.start, e.end or 0.0) for e in self.events)
        began = sorted(self.events, key=lambda event: event.start)
        self.units = list(dict.fromkeys(event.unit for event in began))
        self.depths: dict[int, int] = {}  # by id: how many forwards or backwards span this one
        self.outer: set[int] = set()  # by id: those that span others
        self._nest([event for event in began if event.kind in NESTED])

    def _nest(self, events: list[Event]) -> None:
        around: list[Event] = []
        for event in sorted(events, key=lambda event: (event.start, -self.end(event))):
            around = [other for other in around if self.end(other) >= self.end(event)]
            self.depths[id(event)] = len(around)
            self.outer |= {id(other) for other in around}
            around.append(event)

    @cached_property
    def held(self) -> list[int]:
        """Bytes of all units together, beyond shards, after each event."""
        latest, held = dict.fromkeys(self.units, 0), []
        for event in self.events:
            latest[event.unit] = event.held
            held.append(sum(latest.values()))
        return held

    @cached_property
    def peak(self) -> int:
        """The first event after which most is held."""
        return self.held.index(max(self.held))

    def latest(self, index: int) -> dict[str, Event | None]:
        """Of each unit the last event up to this one, None where there was none."""
        return dict.fromkeys(self.units) | {e.unit: e for e in self.events[: index + 1]}

    def states(self, unit: str) -> list[tuple[str, float, float]]:
        """The unit's states one after the other, each with its seconds from and to."""
        changes = [(SHARDED, 0.0)]
        for event in self.events:
            if event.unit == unit and event.state != changes[-1][0]:
                changes.append((event.state, counts(event)))
        ends = [*(start for _, start in changes[1:]), self.over]
        return [(state, a, b) for (state, a), b in zip(changes, ends, strict=True) if b > a]

    def end(self, event: Event) -> float:
        return self.over if event.end is None else event.end

    # In words.

    def name(self, unit: str) -> str:
        """As short as it can be told from others: the root has no name of its own."""
        parts = [other.split(".") for other in self.units if other]
        same = 0
        while all(len(p) > same + 2 and p[: same + 1] == parts[0][: same + 1] for p in parts):
            same += 1
        return ".".join(unit.split(".")[same:]) or "root"

    def sentence(self, index: int) -> str:
        """What happened, and why."""
        event = self.events[index]
        told = TOLD.get(event.kind, f"{event.kind} of {{unit}}.")
        if event.kind == "wait":
            late = LATE_PARAMETERS if event.state == GATHERING else LATE_GRADIENTS
            told = late if self.end(event) - event.start > NO_WAIT else NO_TIME
        if event.kind == "reshard" and event.state == RESHARDED:
            told = TO_NEAR
        if id(event) in self.outer:
            told += AROUND
        time = duration(self.end(event) - event.start)
        words = told.format(unit=self.name(event.unit), bytes=human(event.bytes), time=time)
        return words[0].upper() + words[1:] if event.unit == "" else words

    def summary(self) -> str:
        peak = self.events[self.peak]
        waits = sum(self.end(e) - e.start for e in self.events if e.kind == "wait")
        return (
            f"{len(self.events):,} events in {duration(self.over)}, of which compute stands still "
            f"for {duration(waits)}. Held beyond shards: at most "
            f"{human(self.held[self.peak])}, at {ms(counts(peak))}, after {peak.kind} of "
            f"{self.name(peak.unit)} (event {self.peak + 1:,})."
        )

    def alt(self) -> str:
        """Alternative text of the picture."""
        kinds = [event.kind for event in self.events]
        count = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        names = ", ".join(map(self.name, self.units))
        return (
            f"Timeline of {self.of}: what is on its way and what is computed ({count}), below it "
            f"the states of the units {names}, and a curve of the bytes held. {self.summary()}"
        )

    def table(self) -> str:
        """HTML: a row for each unit, a column for each kind: how many, how long, and bytes."""
        kinds = list(dict.fromkeys(event.kind for event in self.events))
        rows = [
            (self.name(unit), [e for e in self.events if e.unit == unit]) for unit in self.units
        ]
        heads = "".join(f"<th>{escape(kind)}</th>" for kind in ("unit", *kinds))
        body = "".join(
            f'<tr><td style="text-align:left">{escape(name)}</td>'
            + "".join(f"<td>{self._cell([e for e in of if e.kind == kind])}</td>" for kind in kinds)
            + "</tr>"
            for name, of in [*rows, ("together", self.events)]
        )
        return (
            f"<p><strong>{escape(self.summary())}</strong></p>"
            "<details><summary>Events of each unit and kind: how many, how long, how many bytes"
            f"</summary><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></details>"
        )

    def _cell(self, events: list[Event]) -> str:
        if not events:
            return ""
        seconds = sum(self.end(e) - e.start for e in events)
        nbytes = sum(e.bytes for e in events)
        parts = (
            f"{len(events):,}",
            duration(seconds) if seconds else "",
            human(nbytes) if nbytes else "",
        )
        return " · ".join(part for part in parts if part)


def counts(event: Event) -> float:
    """From when on the event's state and bytes hold, in seconds."""
    return event.start if event.kind in COMMUNICATION or event.end is None else event.end


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
