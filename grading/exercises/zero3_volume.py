"""Lesson 07, 07-volume: what a step of G micro-batches sends, with frozen parameters too."""

from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"zero2": 1, "zero3": 2}


def volume(trained, frozen, ranks, micro_batches, itemsize):
    t, f = ((ranks - 1) * size // ranks * itemsize for size in (trained, frozen))
    return {"zero2": (micro_batches + 1) * t, "zero3": micro_batches * (3 * t + 2 * f)}


def _by_collective(trained, frozen, ranks, micro_batches, itemsize):
    def ring(elements):
        return elements * itemsize * (ranks - 1) // ranks

    gathers = 2 * ring(trained + frozen)  # in forward and in backward
    zero3 = sum(gathers + ring(trained) for _ in range(micro_batches))
    return {"zero2": ring(trained) * micro_batches + ring(trained), "zero3": zero3}


def _volume(
    zero2=lambda t, f, g, n: (g + 1) * t,
    zero3=lambda t, f, g, n: g * (3 * t + 2 * f),
    once=lambda elements, n, itemsize: (n - 1) * elements * itemsize // n,
):
    """The reference with one thing wrong; t and f are bytes of trained and frozen, sent once."""

    def answer(trained, frozen, ranks, micro_batches, itemsize):
        t, f = (once(elements, ranks, itemsize) for elements in (trained, frozen))
        return {
            "zero2": zero2(t, f, micro_batches, ranks),
            "zero3": zero3(t, f, micro_batches, ranks),
        }

    return answer


def _cases(trained: int, frozen: int, ranks: int, micro_batches: int, itemsize: int) -> list[Case]:
    each = "micro-batch" if micro_batches == 1 else "micro-batches"
    name = f"{trained:,} trained, {frozen:,} frozen, {ranks} ranks, {micro_batches} {each}"
    return [Case(name, (trained, frozen, ranks, micro_batches, itemsize), part) for part in PARTS]


VOLUME = Exercise(
    id="07-volume",
    title="What a step sends",
    task="Return the bytes that a rank sends in a step, under ZeRO-2 and under ZeRO-3.",
    points=PARTS,
    reference=volume,
    alternatives=(_by_collective,),
    cases=(*_cases(80, 0, 4, 1, 2), *_cases(80, 0, 4, 3, 2), *_cases(80, 40, 4, 3, 2)),
    fresh=lambda rng: _cases(
        64 * rng.randrange(10**4, 10**6),
        64 * rng.randrange(10**6, 10**7),
        rng.choice((8, 16, 64)),
        rng.randrange(2, 9),
        4,
    ),
    run=call_for_a_line,
    nudge="Count collectives. Of what is trained ZeRO-3 sends an all_gather in forward, one in "
    "backward, and a reduce_scatter; of what is frozen the all_gathers; and all of it in each "
    "micro-batch.",
    misconceptions=(
        Misconception(
            "parameters gathered once a step",
            _volume(zero3=lambda t, f, g, n: 2 * (t + f) + g * t),
            "You gather parameters once a step. They were freed after use, so each micro-batch "
            "gathers them anew.",
        ),
        Misconception(
            "3P a step",
            _volume(zero3=lambda t, f, g, n: 3 * t + 2 * f),
            "3P is right for one micro-batch. Nothing stays whole between micro-batches, neither "
            "parameters nor gradients: each one sends all of it.",
        ),
        Misconception(
            "gathered in forward alone",
            _volume(zero3=lambda t, f, g, n: g * (2 * t + f)),
            "You gather in forward alone. Units are freed after it, and backward needs their "
            "weights again.",
        ),
        Misconception(
            "an all_gather after the update, too",
            _volume(zero3=lambda t, f, g, n: g * (3 * t + 2 * f) + t),
            "You keep ZeRO-2's all_gather after the update. Here a rank updates its shard and is "
            "done: the next forward gathers what is new.",
        ),
        Misconception(
            "frozen ones stay",
            _volume(zero3=lambda t, f, g, n: 3 * g * t),
            "You leave frozen parameters out. They have no gradients, but they are sharded like "
            "the others, and computing needs them whole.",
        ),
        Misconception(
            "frozen ones reduced",
            _volume(zero3=lambda t, f, g, n: 3 * g * (t + f)),
            "You reduce-scatter gradients of frozen parameters, which have none: they are gathered "
            "twice, and that is all.",
        ),
        Misconception(
            "frozen ones gathered once",
            _volume(zero3=lambda t, f, g, n: g * (3 * t + f)),
            "You gather frozen parameters in forward alone. Backward passes through their layers, "
            "and needs their weights for the gradients of the layers' inputs.",
        ),
        Misconception(
            "ZeRO-2 with frozen ones",
            _volume(zero2=lambda t, f, g, n: (g + 1) * (t + f)),
            "Under ZeRO-2 frozen parameters are whole on every rank and never change: nothing of "
            "them is sent.",
        ),
        Misconception(
            "ZeRO-2: 2P",
            _volume(zero2=lambda t, f, g, n: 2 * t),
            "2P is ZeRO-2 with one micro-batch. It reduces the gradients of each, as it has "
            "nowhere to keep them whole: lesson 06.",
        ),
        Misconception(
            "all of the buffer",
            _volume(once=lambda elements, n, itemsize: elements * itemsize),
            "A ring sends N - 1 of N pieces: a rank's own does not travel.",
        ),
        Misconception(
            "all ranks together",
            _volume(once=lambda elements, n, itemsize: (n - 1) * elements * itemsize),
            "That is what all ranks send together. Asked is one rank's.",
        ),
        Misconception(
            "elements",
            lambda t, f, n, g, itemsize: volume(t, f, n, g, 1),
            "You count elements. Each has itemsize bytes.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(volume(*args).values()),
            'Your function does not return a dict with the keys "zero2" and "zero3".',
        ),
    ),
)
