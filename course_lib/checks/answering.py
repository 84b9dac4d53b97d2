"""Run an answer on cases, and give what happened as plain data.

This is all that a sandbox has to do with a learner's code: it needs the cases and the names of
what the answer must not call, and no expected value. Whatever the answer does, an outcome comes
back: a value, or what it raised and on which line. What it prints is kept apart, so that a
warning on stderr costs nobody a point.
"""

import contextlib
import copy
import io
import linecache
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

from course_lib.checks.exercise import Answer, Case, call
from course_lib.checks.plain import NotPlain, Plain, plain
from course_lib.ranks import RankError

_WATCHED: ContextVar[tuple[frozenset[str], list[str]]] = ContextVar("watched")


@dataclass(frozen=True)
class Raised:
    """What an answer raised: the exception's type and message, and the learner's own line."""

    type: str
    message: str
    line: str = ""


@dataclass(frozen=True)
class Outcome:
    """What an answer did with one case. Plain data throughout."""

    value: Plain = None
    raised: Raised | None = None
    off_limits: str = ""
    printed: str = ""


def outcomes(
    answer: Answer,
    cases: Sequence[Case],
    run: Callable[[Answer, Case], object] = call,
    off_limits: Sequence[str] = (),
) -> list[Outcome]:
    """One Outcome for each case, in order. Only KeyboardInterrupt gets through.

    An answer that ran into the time limit once is not run again: it would do so on each case.
    """
    found: list[Outcome] = []
    for case in cases:
        late = found and found[-1].raised and found[-1].raised.type == "RankTimeout"
        found.append(found[-1] if late else _outcome(answer, case, run, off_limits))
    return found


def _outcome(answer: Answer, case: Case, run: Callable, off_limits: Sequence[str]) -> Outcome:
    printed = io.StringIO()
    value, raised = None, None
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(),
        watch(off_limits) as called,
    ):
        warnings.simplefilter("ignore")
        try:
            value = plain(run(answer, replace(case, args=copy.deepcopy(case.args))))
        except NotPlain as error:
            raised = Raised("NotPlain", str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() too: an outcome comes back
            raised = Raised(_type(error), str(error), _line(error, answer))
    return Outcome(value, raised, called[0] if called else "", printed.getvalue()[-2000:])


@contextlib.contextmanager
def watch(off_limits: Iterable[str]) -> Iterator[list[str]]:
    """Collect the names in `off_limits` that are called, under whatever alias."""
    called: list[str] = []
    names = frozenset(off_limits)
    token = _WATCHED.set((names, called))

    def profile(frame, event, _):
        if event == "call":
            module, name = frame.f_globals.get("__name__"), frame.f_code.co_qualname
            if f"{module}:{name}" in names or f"{module}:*" in names:
                called.append(f"{module}:{name}")

    before, in_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(before)
        threading.setprofile(in_threads)
        _WATCHED.reset(token)


def watched() -> tuple[frozenset[str], list[str]]:
    """What is off limits now, and where to add a name that was called in another process."""
    return _WATCHED.get((frozenset(), []))


def _type(error: BaseException) -> str:
    """The exception's type; of one that a rank raised, that rank's."""
    own = error.__cause__ if type(error) is RankError and error.__cause__ else error
    return type(own).__name__


def _line(error: BaseException, answer: Answer) -> str:
    """The last line of the answer's own file that the exception passed through."""
    own = getattr(getattr(answer, "__code__", None), "co_filename", None)
    lines = [
        (frame.lineno, linecache.getline(frame.filename, frame.lineno).strip())
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == own
    ]
    if not lines:
        return ""
    number, source = lines[-1]
    return f"line {number}: {source}" if source else f"line {number}"
