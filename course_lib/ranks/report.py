"""What went wrong on which rank, in words.

The blame goes to the ranks that failed first-hand: one that only lost its connection to a dead
peer is told of as waiting, at the line where it waited. Ranks with the same story share a line.
Libraries' frames are left out, so that the learner's own line is what there is to read. What the
collective log tells comes first: where ranks did not call the same collectives, that is the story,
whatever came of it.
"""

import signal
from collections.abc import Callable, Mapping, Sequence

from course_lib.ranks import desync_report, stack, words
from course_lib.ranks.desync import Verdict
from course_lib.ranks.log import CollectiveLog, Entry
from course_lib.ranks.protocol import Died, Frame, Outcome, Raised, Returned, Unfinished, Unsendable

Outcomes = Mapping[int, Outcome]

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
NATIVE_STACK = "\nException raised from "  # where torch's C++ stack begins in a message
MOST_LINES = 20  # of an exception's message
MOST_FRAMES = 6
MOST_STORIES = 4
TRUST = "all ranks returned, but what they got cannot be trusted"


class RankError(RuntimeError):
    """A run of ranks failed. The message says which ranks, how, and at which of your lines.

    `outcomes` has one entry for each rank, in rank order; `__cause__` is the exception of the
    first rank to blame, where it could be sent.
    """

    def __init__(self, message: str, outcomes: tuple[Outcome, ...] = ()) -> None:
        super().__init__(message)
        self.outcomes = outcomes

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


class RankTimeout(RankError):
    """The deadline passed; the message says which ranks had not finished, and where each was."""


class RankDesync(RankError):
    """The ranks did not call the same collectives in the same order; the message says who did what.

    Raised as soon as it is certain, or at the end of a run that came to one.
    """


class RankInterrupt(KeyboardInterrupt):
    """The run was interrupted, and the ranks were ended; the message says where each was."""

    def _render_traceback_(self) -> list[str]:
        return f"KeyboardInterrupt: {self}".splitlines()


def error(
    outcomes: Sequence[Outcome],
    timeout: float,
    verdict: Verdict | None = None,
    log: CollectiveLog | None = None,
) -> RankError:
    """The error for a run that went wrong; outcomes in rank order.

    `verdict` is what the ranks did not agree on, `log` what they called.
    """
    every, last = dict(enumerate(outcomes)), log.last if log else {}
    blamed = to_blame(every)
    if verdict:
        return RankDesync("\n".join(_desync(verdict, every, last)), tuple(outcomes))
    if blamed:
        lines = [*_stories(blamed, last), *_states(every, blamed, last)]
        return RankError("\n".join(lines), tuple(outcomes))
    head = f"the ranks were ended because they had not finished within {timeout:g} s"
    states = [*_states(every, blamed, last), *_finished(every)]
    return RankTimeout("\n  ".join([head, *states]), tuple(outcomes))


def alone(rank: int, outcome: Raised | Unsendable, last: Entry | None) -> RankError:
    """The error of one rank that knows of no other; `last` is the last collective it called."""
    if _lost_peer(outcome):
        return RankError(f"rank {rank} {_state(outcome, last)} when another rank ended")
    return RankError(f"rank {rank} {_story(outcome, last)}")


def interrupt(outcomes: Sequence[Outcome], log: CollectiveLog) -> RankInterrupt:
    """What to raise in place of a KeyboardInterrupt."""
    every = dict(enumerate(outcomes))
    blamed = to_blame(every)
    lines = [*_stories(blamed, log.last), *_states(every, blamed, log.last), *_finished(every)]
    return RankInterrupt("\n  ".join(["the ranks were ended", *lines]))


def to_blame(outcomes: Outcomes) -> dict[int, Raised | Died | Unsendable]:
    """The ranks that failed, without those that failed only because another one did."""
    failed = {r: o for r, o in outcomes.items() if isinstance(o, (Raised, Died, Unsendable))}
    return {r: o for r, o in failed.items() if not _lost_peer(o)} or failed


def _desync(verdict: Verdict, every: Outcomes, last: Mapping[int, Entry]) -> list[str]:
    """The verdict, and what came of it where the learner's own code noticed."""
    lines = [desync_report.tell(verdict, last)]
    if all(isinstance(outcome, Returned) for outcome in every.values()):
        return [*lines, TRUST]
    noticed = {
        rank: o
        for rank, o in every.items()
        if isinstance(o, Raised) and o.frames and stack.learners(o.frames[-1])
    }
    return lines + _together(noticed, lambda _, outcome: _story(outcome, None))


def _stories(blamed: Outcomes, last: Mapping[int, Entry]) -> list[str]:
    stories = _together(blamed, lambda rank, outcome: _story(outcome, last.get(rank)))
    if len(stories) > MOST_STORIES:
        more = f"… and {len(stories) - MOST_STORIES} other errors on other ranks"
        return [*stories[:MOST_STORIES], more]
    return stories


def _states(every: Outcomes, blamed: Outcomes, last: Mapping[int, Entry]) -> list[str]:
    late = {r: o for r, o in every.items() if r not in blamed and not isinstance(o, Returned)}
    return _together(late, lambda rank, outcome: _state(outcome, last.get(rank)))


def _finished(every: Outcomes) -> list[str]:
    done = [rank for rank, outcome in every.items() if isinstance(outcome, Returned)]
    return [f"{words.names(done)} had finished"] if done else []


def _together(outcomes: Outcomes, tell: Callable[[int, Outcome], str]) -> list[str]:
    """One text for each different story, which starts with the names of the ranks that share it."""
    sharing: dict[str, list[int]] = {}
    for rank in sorted(outcomes):
        sharing.setdefault(tell(rank, outcomes[rank]), []).append(rank)
    return [
        f"{words.names(ranks)} {'were ' + story[4:] if plural else story}"
        for story, ranks in sharing.items()
        for plural in [len(ranks) > 1 and story.startswith("was ")]
    ]


def _story(outcome: Raised | Died | Unsendable, last: Entry | None) -> str:
    """How a rank failed."""
    if isinstance(outcome, Unsendable):
        return (
            f"returned a {outcome.type} that cannot be sent back ({_short(outcome.reason)}); "
            "return numbers, tensors, or lists and dicts of them"
        )
    if isinstance(outcome, Died):
        story = f"died before returning: {_ending(outcome.exit_code)}"
        if not last:
            return story
        return words.joined(
            story, f"{'after' if last.end else 'in'} {words.sized(last)}", last.site
        )
    message = _short(outcome.message)
    head = f"raised {outcome.type}" + (f": {message}" if message else "")
    return "\n".join([head, *_listing(outcome.frames)])


def _state(outcome: Raised | Unfinished, last: Entry | None) -> str:
    """Where a rank that is not to blame was when the run ended."""
    # A collective that loses its peer may fail before the rank comes to wait for it.
    if last and not last.end and (last.waiting or isinstance(outcome, Raised)):
        return "was " + words.joined(f"in {words.sized(last)}", words.line(last))
    state = f"was {stack.whereabouts(outcome.frames)}"
    if not last:
        return state
    return f"{state} (last collective: {words.sized(last)}{'' if last.end else ', not ended'})"


def _listing(frames: tuple[Frame, ...]) -> list[str]:
    """The learner's lines; where there are none, the last line, whosever it is."""
    own = [frame for frame in frames if stack.learners(frame)] or frames[-1:]
    lines = []
    for frame in own:
        code = stack.source(frame)
        line = f"  {stack.place(frame)}, in {frame.function}"
        lines.append(f"{line}\n    {code}" if code else line)
    if len(lines) > MOST_FRAMES:
        lines[2 : 2 - MOST_FRAMES] = ["  …"]
    return lines


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "it closed its pipe"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    memory = " (often: out of memory)" if name == "SIGKILL" else ""
    return f"signal {name}{memory}"


def _lost_peer(outcome: Outcome) -> bool:
    return isinstance(outcome, Raised) and any(sign in outcome.message for sign in LOST_PEER)


def _short(message: str) -> str:
    lines = message.partition(NATIVE_STACK)[0].strip().splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"… {len(lines) - MOST_LINES} more lines"]
    return "\n".join(lines)
