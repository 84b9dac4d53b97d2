"""What an exercise is: everything about it, in one description.

A learner's answer is a function. It is called on *cases*: the fixed ones (edges, smallest first)
and fresh ones drawn from a seed. What it returns is compared with what the *reference* returns.
Where it differs, the *misconceptions*, plausible wrong answers written as code, are called on the
same cases: the one that gives what the learner gave names the idea that went wrong.

The description therefore holds nothing about the place where an answer ran. `answering` turns an
answer and cases into plain data; `judging` compares plain data. They may run in one kernel, or on
two sides of a sandbox's wall.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random

from course_lib.checks.comparison import Compare, exactly

Answer = Callable[..., object]


@dataclass(frozen=True)
class Case:
    """One call of the answer. `args` is plain data: numbers, strings, lists, dicts of them.

    `given` tells a learner what the answer was given, where the arguments themselves do not.
    """

    name: str
    args: tuple = ()
    part: str = "all"
    given: str = ""


@dataclass(frozen=True)
class Misconception:
    """A plausible wrong answer, the sentence that it must trigger, and a hint that goes further."""

    name: str
    answer: Answer
    hint: str
    further: str = ""


def call(answer: Answer, case: Case) -> object:
    """The usual way to run a case: call the answer with the case's arguments."""
    return answer(*case.args)


class NotALine(TypeError):
    """What was returned is no dict with the key that was asked for."""


def call_for_a_line(answer: Answer, case: Case) -> object:
    """Call an answer that returns a dict, and take the line that the case's part is about."""
    lines = answer(*case.args)
    if isinstance(lines, dict) and case.part in lines:
        return lines[case.part]
    raise NotALine(f"return a dict that has the key {case.part!r}; it returned {lines!r:.80}")


def nothing_fresh(rng: Random) -> Iterable[Case]:
    """For an exercise whose fixed cases are all there is."""
    return ()


@dataclass(frozen=True)
class Exercise:
    """See the module's docstring. `points` maps each part to what it is worth.

    `task` is one imperative sentence: the stub raises it. `library` names the library's own
    implementations of what is asked: an answer that calls one scores nothing. `run` says how a
    case is run, where that is more than a call (on ranks, say). `nudge` is the further hint when
    no misconception explains the answer.
    """

    id: str
    title: str
    task: str
    points: Mapping[str, int]
    reference: Answer
    cases: tuple[Case, ...]
    misconceptions: tuple[Misconception, ...]
    alternatives: tuple[Answer, ...] = ()
    fresh: Callable[[Random], Iterable[Case]] = nothing_fresh
    compare: Compare = exactly
    library: tuple[Callable | property, ...] = ()
    run: Callable[[Answer, Case], object] = call
    nudge: str = ""

    @property
    def lesson(self) -> str:
        """The lesson's number, as the id begins: "01-block" belongs to "01"."""
        return self.id[:2]

    @property
    def total(self) -> int:
        return sum(self.points.values())

    def all_cases(self, seed: int) -> tuple[Case, ...]:
        """The fixed cases, then fresh ones: the same for the same seed."""
        return (*self.cases, *self.fresh(Random(f"{self.id}:{seed}")))

    def off_limits(self) -> tuple[str, ...]:
        """What an answer must not call, as `module:qualified_name`; `module:*` is all of one."""
        functions = (*self.library, self.reference, *self.alternatives)
        names = tuple(_name(getattr(f, "fget", f)) for f in functions)
        home = self.reference.__module__
        # What stands beside the reference is made of it.
        return (*names, f"{home}:*") if home.startswith("grading.") else names


def _name(function: Callable) -> str:
    return f"{function.__module__}:{function.__qualname__}"
