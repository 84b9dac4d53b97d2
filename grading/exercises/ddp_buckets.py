"""Lesson 04, 04-buckets: which gradients travel together."""

from random import Random

from course_lib import comm
from course_lib.checks.exercise import Case, Exercise, Misconception


def fill_buckets(sizes, cap):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= cap:
            buckets.append(bucket)
            bucket, held = [], 0
    if bucket:
        buckets.append(bucket)
    return buckets


def _open_when_needed(sizes, cap):
    buckets, room = [], 0
    for index in range(len(sizes) - 1, -1, -1):
        if room <= 0:
            buckets.append([])
            room = cap
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


def _filled(indices, full, close_before=False, reset=True, keep_last=True, twice=False):
    """A wrong way to fill: `full(held, members, cap)` says when a bucket is."""

    def answer(sizes, cap):
        buckets, bucket, held = [], [], 0
        for index in indices(len(sizes)):
            if close_before and bucket and held + sizes[index] > cap:
                buckets.append(bucket)
                bucket, held = [], 0
            bucket.append(index)
            held += sizes[index]
            if not close_before and full(held, bucket, cap):
                over = held > cap
                buckets.append(bucket)
                bucket, held = ([index], held - cap) if twice and over else ([], held * (not reset))
        return buckets + [bucket] * bool(bucket and keep_last)

    return answer


def _always_kept(sizes, cap):
    closed = _filled(_backward, _capped, keep_last=False)(sizes, cap)
    left = len(sizes) - sum(map(len, closed))
    return [*closed, list(reversed(range(left)))]


def _cleared(sizes, cap):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= cap:
            buckets.append(bucket)
            bucket.clear()
            held = 0
    return buckets + [bucket] * bool(bucket)


def _named(name):
    """The right buckets, with `name(sizes, index)` in the place of each index."""

    def answer(sizes, cap):
        return [[name(sizes, index) for index in bucket] for bucket in fill_buckets(sizes, cap)]

    return answer


def _backward(n):
    return reversed(range(n))


def _capped(held, members, cap):
    return held >= cap


def _fresh_sizes(rng: Random) -> list[Case]:
    """Among them a tensor larger than the cap, and one that fills a bucket exactly."""
    cap = rng.randrange(20, 40)
    sizes = [rng.randrange(1, cap // 2) for _ in range(rng.randint(7, 10))]
    return [_bucket_case([*sizes, 2 * cap + 5, cap - 3, 3, cap - 5, 4, 9], cap)]


def _bucket_case(sizes: list[int], cap: int) -> Case:
    return Case(f"{len(sizes)} tensors", (sizes, cap))


BUCKETS = Exercise(
    id="04-buckets",
    title="Put gradients into buckets",
    task="Return the buckets, lists of indices, in the order in which backward fills them.",
    points={"all": 3},
    reference=fill_buckets,
    alternatives=(_open_when_needed,),
    cases=(
        _bucket_case([8, 4, 4], 8),  # the last bucket closes exactly at the cap
        _bucket_case([4, 8, 4, 4], 8),
        _bucket_case([6, 6, 6], 100),
        _bucket_case([1, 1, 2, 1, 5, 1, 2], 3),
        _bucket_case([3, 9, 2, 5, 30, 4], 10),
    ),
    fresh=_fresh_sizes,
    library=(comm.buckets,),
    nudge="From the last tensor to the first: add it; close the bucket if it now holds the cap.",
    misconceptions=(
        Misconception(
            "forward order",
            _filled(range, _capped),
            "You fill buckets in the model's order. Backward computes the last layer's gradients "
            "first: with yours, the first bucket would be full at the very end.",
            "Go through the indices in reverse.",
        ),
        Misconception(
            "forward order, turned round",
            lambda sizes, cap: [b[::-1] for b in reversed(_filled(range, _capped)(sizes, cap))],
            "You fill the buckets in forward order and turn the result round. Which tensors share "
            "a bucket depends on where filling begins: at the last one.",
        ),
        Misconception(
            "the last bucket lost",
            _filled(_backward, _capped, keep_last=False),
            "The last bucket is missing: it never reaches the cap, but its gradients must travel "
            "too.",
            "After the loop, keep what has not been closed.",
        ),
        Misconception(
            "an empty bucket at the end",
            _always_kept,
            "You append the last bucket even when it is empty: where the last tensor has closed "
            "one, nothing is left over.",
            "if bucket: buckets.append(bucket)",
        ),
        Misconception(
            "sizes instead of indices",
            _named(lambda sizes, index: sizes[index]),
            "Your buckets hold the sizes. They should hold indices into sizes.",
        ),
        Misconception(
            "indices counted from the end",
            _named(lambda sizes, index: len(sizes) - 1 - index),
            "You count from the end: index 0 is the first parameter.",
            "reversed(range(len(sizes))) gives the indices; enumerate(reversed(…)) does not.",
        ),
        Misconception(
            "the appended list cleared",
            _cleared,
            "You clear the list that you have just appended: make a new one.",
            "append keeps the list itself, not a copy of it: bucket = [] leaves it alone.",
        ),
        Misconception(
            "closed before the cap",
            _filled(_backward, _capped, close_before=True),
            "You close a bucket before it would go over the cap. DDP's rule is the other one: it "
            "is closed when it has reached the cap, with the tensor that took it there.",
        ),
        Misconception(
            "closed only above the cap",
            _filled(_backward, lambda held, members, cap: held > cap),
            "A bucket that holds exactly the cap is full: you wait for one tensor more.",
            "Is it > where it should be >=?",
        ),
        Misconception(
            "the count is never set back",
            _filled(_backward, _capped, reset=False),
            "After the first full bucket every tensor gets a bucket of its own: you do not set the "
            "number of bytes held back to 0.",
        ),
        Misconception(
            "one tensor a bucket",
            lambda sizes, cap: [[index] for index in reversed(range(len(sizes)))],
            "Each tensor has its own bucket: that is one all_reduce for each, and each pays the "
            "latency.",
        ),
        Misconception(
            "one bucket for all",
            lambda sizes, cap: [list(reversed(range(len(sizes))))],
            "All is in one bucket: it is full when backward ends, and nothing is left to hide its "
            "all_reduce behind.",
        ),
        Misconception(
            "tensors counted instead of bytes",
            _filled(_backward, lambda held, members, cap: len(members) >= cap),
            "You close a bucket after so many tensors. The cap is in bytes.",
        ),
        Misconception(
            "a tensor in two buckets",
            _filled(_backward, _capped, twice=True),
            "A tensor that goes over the cap appears in two buckets. A tensor is never split: it "
            "stays whole in the bucket that it filled.",
        ),
    ),
)
