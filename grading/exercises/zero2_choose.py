"""Lesson 06, 06-choose: when is ZeRO-1 the smaller one?"""

from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = ("zero1", "zero2", "smaller")


def in_backward(parameters, ranks, bucket, buffers):
    zero1 = 2 * parameters
    zero2 = 2 * -(-parameters // ranks) + buffers * 2 * bucket
    return {"zero1": zero1, "zero2": zero2, "smaller": "zero1" if zero1 < zero2 else "zero2"}


def _by_elements(parameters, ranks, bucket, buffers):
    shard = (parameters + ranks - 1) // ranks
    elements = {"zero1": parameters, "zero2": shard + buffers * bucket}
    held = {stage: 2 * count for stage, count in elements.items()}
    return held | {"smaller": min(held, key=held.get)}


def _held(zero1=lambda p, n: 2 * p, zero2=None, smaller=None):
    """The reference with one thing wrong; `zero2(shard, buffer, buffers, p, n)`, in bytes."""

    def answer(parameters, ranks, bucket, buffers):
        one = zero1(parameters, ranks)
        shard = 2 * -(-parameters // ranks)
        change = zero2 or (lambda shard, buffer, buffers, p, n: shard + buffers * buffer)
        two = change(shard, 2 * bucket, buffers, parameters, ranks)
        return {
            "zero1": one,
            "zero2": two,
            "smaller": smaller or ("zero1" if one < two else "zero2"),
        }

    return answer


def _not_rounded(parameters, ranks, bucket, buffers):
    held = in_backward(parameters, ranks, bucket, buffers)
    return held | {"zero2": 2 * parameters / ranks + buffers * 2 * bucket}


def _rounded_down(parameters, ranks, bucket, buffers):
    held = in_backward(parameters, ranks, bucket, buffers)
    return held | {"zero2": 2 * (parameters // ranks) + buffers * 2 * bucket}


def _cases(parameters: int, ranks: int, bucket: int, buffers: int) -> list[Case]:
    each = "buffer" if buffers == 1 else "buffers"
    name = f"{parameters:,} parameters on {ranks} ranks, {buffers} {each} of {bucket:,}"
    return [Case(name, (parameters, ranks, bucket, buffers), part) for part in PARTS]


_WHOLE = "A shard has P/N elements, rounded up: a whole number, and N of them hold all P."

CHOOSE = Exercise(
    id="06-choose",
    title="When is ZeRO-1 the smaller one?",
    task="Return what both stages hold while backward runs, and which of them is smaller.",
    points={part: 1 for part in PARTS},
    reference=in_backward,
    alternatives=(_by_elements,),
    cases=(*_cases(1_000_000, 4, 300_000, 2), *_cases(7_000_001, 8, 300_000, 2)),
    fresh=lambda rng: [
        *_cases(2 * rng.randrange(10**8, 2 * 10**8) + 1, rng.choice((16, 64)), 5 * 10**8, 2),
        *_cases(2 * rng.randrange(35 * 10**8, 4 * 10**9) + 1, rng.choice((16, 64)), 5 * 10**8, 1),
    ],
    run=call_for_a_line,
    nudge="ZeRO-1: all gradients. ZeRO-2: a shard of them, rounded up, and the buffers, each of "
    "`bucket` elements, however small the model.",
    misconceptions=(
        Misconception(
            "no buffers",
            _held(zero2=lambda shard, buffer, buffers, p, n: shard),
            "You count what is at rest. While backward runs, the buffers through which gradients "
            "pass are there, too.",
        ),
        Misconception(
            "one buffer",
            _held(zero2=lambda shard, buffer, buffers, p, n: shard + buffer),
            "You count one buffer. There are `buffers` of them: one fills while another travels.",
        ),
        Misconception(
            "a bucket in bytes",
            _held(zero2=lambda shard, buffer, buffers, p, n: shard + buffers * buffer // 2),
            "You take bucket for bytes. It is in elements, of 2 bytes each, as DeepSpeed's "
            "reduce_bucket_size is.",
        ),
        Misconception(
            "as small as the model",
            _held(zero2=lambda shard, b, buffers, p, n: shard + buffers * min(b, 2 * p)),
            "You make the buffers no larger than the model. These are of a fixed size: they are "
            "allocated whole, however little there is to put in.",
        ),
        Misconception(
            "sharded buffers",
            _held(zero2=lambda shard, b, buffers, p, n: shard + buffers * -(-b // n)),
            "You divide the buffers by the ranks. A bucket holds whole gradients, before they are "
            "reduced: every rank has all of it.",
        ),
        Misconception(
            "whole gradients under ZeRO-2",
            _held(zero2=lambda shard, b, buffers, p, n: 2 * p + buffers * b),
            "You count whole gradients under ZeRO-2. They pass through the buffers and are freed; "
            "what stays is a shard.",
        ),
        Misconception(
            "sharded gradients under ZeRO-1",
            _held(zero1=lambda p, n: 2 * -(-p // n)),
            "You shard the gradients of ZeRO-1. It shards optimizer states; its gradients are "
            "whole on every rank.",
        ),
        Misconception(
            "four bytes",
            lambda p, n, bucket, buffers: {
                stage: 2 * value if stage != "smaller" else value
                for stage, value in in_backward(p, n, bucket, buffers).items()
            },
            "You count 4 bytes for each element: gradients are in bf16, which has 2.",
        ),
        Misconception(
            "not rounded",
            _not_rounded,
            _WHOLE,
        ),
        Misconception(
            "rounded down",
            _rounded_down,
            _WHOLE,
        ),
        Misconception(
            "ZeRO-2 always",
            _held(smaller="zero2"),
            "The bytes are right; compare them. Where buffers are larger than what sharding saves, "
            "ZeRO-1 is smaller.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(in_backward(*args).values()),
            'Your function does not return a dict with the keys "zero1", "zero2" and "smaller".',
        ),
    ),
)
