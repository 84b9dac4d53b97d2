"""Lesson 09, 09-exposed: communication that no compute of this rank covers."""

from itertools import pairwise

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.figures import sweep as library


def exposed(communication, compute):
    cuts = sorted({time for span in [*communication, *compute] for time in span})
    seconds = 0.0
    for start, end in pairwise(cuts):
        sending, computing = (
            any(a <= start and end <= b for a, b in spans) for spans in (communication, compute)
        )
        if sending and not computing:
            seconds += end - start
    return seconds


def _merged(spans):
    whole = []
    for start, end in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1][1] = max(whole[-1][1], end)
        else:
            whole.append([start, end])
    return whole


def _length(spans):
    return sum(end - start for start, end in spans)


def _covered(one, other):
    """Seconds of spans of `one` that lie within a span of `other`, each pair by itself."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in one for c, d in other)


def _by_merging(communication, compute):
    sent, busy = _merged(communication), _merged(compute)
    return _length(sent) - _covered(sent, busy)


def _idle(communication, compute):
    ends = [time for span in [*communication, *compute] for time in span]
    return max(ends) - min(ends) - _length(_merged(compute))


def _after_compute(communication, compute):
    return max(0.0, max(b for _, b in communication) - max([b for _, b in compute], default=0.0))


def _case(name: str, communication: list, compute: list) -> Case:
    return Case(name, (communication, compute))


def _fresh(rng) -> Case:
    def spans(count):
        starts = [rng.randrange(0, 40) / 2 for _ in range(count)]
        return [[start, start + rng.randrange(1, 12) / 2] for start in starts]

    return _case("many", spans(8), spans(5))


EXPOSED = Exercise(
    id="09-exposed",
    title="Exposed communication",
    task="Return the seconds in which something is on the link and nothing is computed.",
    points={"all": 4},
    reference=exposed,
    alternatives=(_by_merging,),
    library=(library.uncovered,),
    compare=close(1e-9, 1e-9),
    cases=(
        _case("one of each", [[0.0, 4.0]], [[1.0, 3.0]]),
        _case("two gathers at a time", [[0.0, 4.0], [2.0, 6.0]], [[3.0, 5.0]]),
        _case("compute within compute", [[0.0, 6.0]], [[1.0, 4.0], [2.0, 3.0]]),
        _case("a pause", [[0.0, 1.0], [5.0, 7.0]], [[2.0, 6.0]]),
        _case("no compute", [[1.0, 2.0], [4.0, 5.0]], []),
    ),
    fresh=lambda rng: [_fresh(rng), _fresh(rng)],
    nudge="Cut time at every start and every end. Between two neighbouring cuts nothing changes: "
    "the piece counts if some communication spans it, and no compute does.",
    misconceptions=(
        Misconception(
            "all communication",
            lambda communication, compute: _length(communication),
            "You add up all communication. What travels while this rank computes costs no time.",
        ),
        Misconception(
            "the difference of the sums",
            lambda communication, compute: _length(communication) - _length(compute),
            "You subtract one sum from the other, as if all compute covered something. It matters "
            "when each happens: compute covers what is on the link at that moment.",
        ),
        Misconception(
            "what is covered",
            lambda communication, compute: _covered(_merged(communication), _merged(compute)),
            "That is what compute covers: hidden communication. Exposed is the rest.",
        ),
        Misconception(
            "each pair by itself",
            lambda communication, compute: (
                _length(communication) - _covered(communication, compute)
            ),
            "You go through pairs of spans, and count moments more than once: where two "
            "collectives are under way at a time, and where one span of compute lies within "
            "another.",
        ),
        Misconception(
            "two gathers counted twice",
            lambda communication, compute: sum(exposed([span], compute) for span in communication),
            "Where two collectives are under way at the same time, you count that time twice. One "
            "second of waiting is one second.",
        ),
        Misconception(
            "compute counted twice",
            lambda communication, compute: (
                _length(_merged(communication)) - _covered(_merged(communication), compute)
            ),
            "Where one span of compute lies within another (a block's within the root's), you "
            "subtract that time twice.",
        ),
        Misconception(
            "all that is not compute",
            _idle,
            "You count all time without compute. Where nothing is on the link either, the rank "
            "waits for something else.",
        ),
        Misconception(
            "after compute alone",
            _after_compute,
            "You count what is left when compute has ended. That was DDP; here compute also waits "
            "before and between units, for gathers.",
        ),
        Misconception(
            "hidden as soon as they meet",
            lambda communication, compute: _length(
                _merged([x for x in communication if not _covered([x], compute)])
            ),
            "You take a collective for hidden as soon as some compute meets it. Only the part that "
            "is covered is hidden.",
        ),
        Misconception(
            "exposed unless covered as a whole",
            lambda communication, compute: _length(
                _merged(
                    [
                        [a, b]
                        for a, b in communication
                        if not any(c <= a and b <= d for c, d in _merged(compute))
                    ]
                )
            ),
            "You take a collective for exposed unless compute covers all of it. The part that is "
            "covered is hidden.",
        ),
        Misconception(
            "compute without communication",
            lambda communication, compute: exposed(compute, communication),
            "You have it the wrong way round: that is compute without communication.",
        ),
    ),
)
