"""What went wrong on which rank, in words.

The blame goes to the ranks that failed first-hand: one that only lost its connection to a dead
peer is told of as waiting, at the line where it waited. Ranks with the same story share a line.
Libraries' frames are left out, so that the learner's own line is what there is to read.
"""

import signal
from collections.abc import Callable, Mapping, Sequence

from course_lib.ranks import stack
from course_lib.ranks.protocol import Died, Frame, Outcome, Raised, Returned, Unfinished, Unsendable

Outcomes = Mapping[int, Outcome]

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
NATIVE_STACK = "\nException raised from "  # where torch's C++ stack begins in a message
MOST_LINES = 20  # of an exception's message
MOST_FRAMES = 6
MOST_STORIES = 4


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


def error(outcomes: Sequence[Outcome], timeout: float) -> RankError:
    """The error for a run in which some rank did not return; outcomes in rank order."""
    every = dict(enumerate(outcomes))
    blamed = to_blame(every)
    done = {rank: o for rank, o in every.items() if isinstance(o, Returned)}
    late = {rank: o for rank, o in every.items() if rank not in blamed and rank not in done}
    if not blamed:
        head = f"the ranks were ended because they had not finished within {timeout:g} s"
        states = [*_together(late, _state), *_together(done, _state)]
        return RankTimeout("\n  ".join([head, *states]), tuple(outcomes))
    stories = _together(blamed, _story)
    if len(stories) > MOST_STORIES:
        more = f"… and {len(stories) - MOST_STORIES} other errors on other ranks"
        stories = [*stories[:MOST_STORIES], more]
    return RankError("\n".join([*stories, *_together(late, _state)]), tuple(outcomes))


def to_blame(outcomes: Outcomes) -> dict[int, Raised | Died | Unsendable]:
    """The ranks that failed, without those that failed only because another one did."""
    failed = {r: o for r, o in outcomes.items() if isinstance(o, (Raised, Died, Unsendable))}
    return {r: o for r, o in failed.items() if not _lost_peer(o)} or failed


def names(ranks: list[int]) -> str:
    """ "rank 2", "ranks 0, 1 and 3", "ranks 0-3 and 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return ("rank " if len(ranks) == 1 else "ranks ") + listed


def _together(outcomes: Outcomes, tell: Callable[[Outcome], str]) -> list[str]:
    """One text for each different story, which starts with the names of the ranks that share it."""
    sharing: dict[str, list[int]] = {}
    for rank in sorted(outcomes):
        sharing.setdefault(tell(outcomes[rank]), []).append(rank)
    return [
        f"{names(ranks)} {'were ' + story[4:] if plural else story}"
        for story, ranks in sharing.items()
        for plural in [len(ranks) > 1 and story.startswith("was ")]
    ]


def _story(outcome: Raised | Died | Unsendable) -> str:
    """How a rank failed."""
    if isinstance(outcome, Unsendable):
        return (
            f"returned a {outcome.type} that cannot be sent back ({_short(outcome.reason)}); "
            "return numbers, tensors, or lists and dicts of them"
        )
    if isinstance(outcome, Died):
        return f"died before returning: {_ending(outcome.exit_code)}"
    message = _short(outcome.message)
    head = f"raised {outcome.type}" + (f": {message}" if message else "")
    return "\n".join([head, *_listing(outcome.frames)])


def _state(outcome: Outcome) -> str:
    """Where a rank that is not to blame was when the run ended."""
    if isinstance(outcome, Returned):
        return "had finished"
    frames = outcome.frames if isinstance(outcome, (Raised, Unfinished)) else ()
    return f"was {stack.whereabouts(frames)}"


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
