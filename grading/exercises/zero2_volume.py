"""Lesson 06, 06-volume: what a step of G micro-batches sends."""

from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line


def volume(parameters, ranks, micro_batches, itemsize):
    shard = -(-parameters // ranks)
    once = (ranks - 1) * shard * itemsize
    return {"zero1": 2 * once, "zero2": (micro_batches + 1) * once}


def _volume_by_collective(parameters, ranks, micro_batches, itemsize):
    padded = parameters + (-parameters) % ranks
    reduce_scatter = all_gather = padded * itemsize * (ranks - 1) // ranks
    zero1 = reduce_scatter + all_gather
    return {"zero1": zero1, "zero2": micro_batches * reduce_scatter + all_gather}


def _volume(zero1=lambda once, g, n: 2 * once, zero2=lambda once, g, n: (g + 1) * once):
    def answer(parameters, ranks, micro_batches, itemsize):
        once = (ranks - 1) * -(-parameters // ranks) * itemsize
        return {
            "zero1": zero1(once, micro_batches, ranks),
            "zero2": zero2(once, micro_batches, ranks),
        }

    return answer


def _all_of_the_buffer(parameters, ranks, micro_batches, itemsize):
    whole = ranks * -(-parameters // ranks) * itemsize
    return {"zero1": 2 * whole, "zero2": (micro_batches + 1) * whole}


def _not_padded(parameters, ranks, micro_batches, itemsize):
    once = (ranks - 1) / ranks * parameters * itemsize
    return {"zero1": 2 * once, "zero2": (micro_batches + 1) * once}


def _rounded_down(parameters, ranks, micro_batches, itemsize):
    once = (ranks - 1) * (parameters // ranks) * itemsize
    return {"zero1": 2 * once, "zero2": (micro_batches + 1) * once}


def _of_parameters(parameters, ranks, micro_batches, itemsize):
    whole = parameters * itemsize
    return {"zero1": 2 * whole, "zero2": (micro_batches + 1) * whole}


def _cases(parameters: int, ranks: int, micro_batches: int, itemsize: int) -> list[Case]:
    each = "micro-batch" if micro_batches == 1 else "micro-batches"
    name = f"{parameters:,} parameters on {ranks} ranks, {micro_batches} {each}"
    args = parameters, ranks, micro_batches, itemsize
    return [Case(name, args, part) for part in ("zero1", "zero2")]


_RING = "A ring sends N - 1 of N pieces: a rank's own does not travel."

VOLUME = Exercise(
    id="06-volume",
    title="What a step sends",
    task="Return the bytes that a rank sends in a step, under ZeRO-1 and under ZeRO-2.",
    points={"zero1": 1, "zero2": 2},
    reference=volume,
    alternatives=(_volume_by_collective,),
    cases=(*_cases(10, 4, 1, 2), *_cases(10, 4, 3, 2)),
    fresh=lambda rng: _cases(
        1 + 8 * rng.randrange(10**6, 10**8), rng.choice((8, 16, 64)), rng.randrange(2, 9), 4
    ),
    run=call_for_a_line,
    nudge="Count collectives: how often does each move P elements in a step? A ring sends N - 1 of "
    "a buffer's N pieces.",
    misconceptions=(
        Misconception(
            "always 2P",
            _volume(zero2=lambda once, g, n: 2 * once),
            "2P is right for one micro-batch. ZeRO-2 has nowhere to keep whole gradients, so it "
            "reduces those of every micro-batch.",
        ),
        Misconception(
            "all_gathers for each micro-batch",
            _volume(zero2=lambda once, g, n: 2 * g * once),
            "You gather parameters for each micro-batch. They change once a step, so one "
            "all_gather is enough; only gradients travel each time.",
        ),
        Misconception(
            "ZeRO-1 reduces each micro-batch",
            _volume(zero1=lambda once, g, n: (g + 1) * once),
            "ZeRO-1 holds whole gradients, so it adds micro-batches up where they are, and "
            "reduces the sum once a step.",
        ),
        Misconception(
            "gradients alone",
            _volume(zero1=lambda once, g, n: once, zero2=lambda once, g, n: g * once),
            "You count gradients alone. After the update each rank has new values of its own shard "
            "only: an all_gather hands them round.",
        ),
        Misconception(
            "ZeRO-2's gradients alone",
            _volume(zero2=lambda once, g, n: g * once),
            "Of ZeRO-2 you count gradients alone. The all_gather of updated parameters is there as "
            "in ZeRO-1, once a step.",
        ),
        Misconception(
            "an all_reduce for each micro-batch",
            _volume(zero2=lambda once, g, n: (2 * g + 1) * once),
            "You count an all_reduce for each micro-batch. A reduce_scatter is half of that, and "
            "an owner needs no more.",
        ),
        Misconception(
            "all of the buffer",
            _all_of_the_buffer,
            _RING,
        ),
        Misconception(
            "2P and (G+1)P, to the letter",
            _of_parameters,
            _RING,
            "A rank sends N - 1 shards, each P/N rounded up.",
        ),
        Misconception(
            "rounded down",
            _rounded_down,
            "You round a shard down: some elements belong to nobody. It is rounded up, and the "
            "last one is padded.",
        ),
        Misconception(
            "not padded",
            _not_padded,
            "P/N is no whole number here. A shard is rounded up: the last one is padded, and "
            "padding travels, too.",
        ),
        Misconception(
            "all ranks together",
            _volume(
                zero1=lambda once, g, n: 2 * n * once, zero2=lambda once, g, n: (g + 1) * n * once
            ),
            "That is what all ranks send together. Asked is one rank's.",
        ),
        Misconception(
            "elements",
            lambda p, n, g, itemsize: volume(p, n, g, 1),
            "You count elements. Each has itemsize bytes.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(volume(*args).values()),
            'Your function does not return a dict with the keys "zero1" and "zero2".',
        ),
    ),
)
