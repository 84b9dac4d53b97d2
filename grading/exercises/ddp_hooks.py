"""Lesson 04, 04-hooks: all-reduce a bucket while backward goes on."""

from functools import partial

import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.ddp import DDP
from grading.exercises import small_model


def overlap(buckets):
    arrived, started = set(), []

    def on_gradient(bucket, parameter):
        arrived.add(parameter)
        if arrived.issuperset(bucket):
            flat = parameters_to_vector([p.grad for p in bucket]) / dist.get_world_size()
            started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for bucket, flat, work in started:
            work.wait()
            vector_to_parameters(flat, [p.grad for p in bucket])
        arrived.clear(), started.clear()

    for bucket in buckets:
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, bucket))
    return finish


class _CountingBucket:
    """A different way to the same: a bucket that knows how many gradients it still waits for."""

    def __init__(self, parameters):
        self.parameters, self.missing = parameters, len(parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, _):
        self.missing -= 1
        if not self.missing:
            self.flat = parameters_to_vector([p.grad for p in self.parameters])
            self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self):
        self.work.wait()
        self.flat /= dist.get_world_size()
        sizes = [p.numel() for p in self.parameters]
        for parameter, average in zip(self.parameters, self.flat.split(sizes), strict=True):
            parameter.grad = average.view_as(parameter)
        self.missing = len(self.parameters)


def _overlap_by_counting(buckets):
    counting = [_CountingBucket(bucket) for bucket in buckets]

    def finish():
        for bucket in counting:
            bucket.finish()

    return finish


def _overlap(
    ready=lambda arrived, bucket: set(arrived) >= set(bucket),
    register="register_post_accumulate_grad_hook",
    share=dist.get_world_size,
    in_hook=True,
    wait_in_hook=False,
    wait=True,
    write=True,
    reset=True,
    forget=True,
):
    """The reference with one thing wrong. `arrived`: the bucket's parameters so far, in order."""

    def answer(buckets):
        arrived, started = [], []

        def start(bucket):
            flat = parameters_to_vector([p.grad for p in bucket]) / share()
            started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            if wait_in_hook:
                started[-1][-1].wait()

        def on_gradient(bucket, parameter, _):
            arrived.append(parameter)
            if in_hook and ready([p for p in arrived if any(p is q for q in bucket)], bucket):
                start(bucket)

        def finish():
            for bucket in buckets * (not in_hook):
                start(bucket)
            for bucket, flat, work in started:
                if wait:
                    work.wait()
                if write:
                    vector_to_parameters(flat, [p.grad for p in bucket])
            if forget:
                started.clear()
            if reset:
                arrived.clear()

        for bucket in buckets:
            for parameter in bucket:
                getattr(parameter, register)(partial(on_gradient, bucket, parameter))
        return finish

    return answer


def _late_binding(buckets):
    return overlap(buckets[-1:])  # all that a lambda which looks the loop's variable up will see


def _late_binding_and_a_count(buckets):
    """The last bucket seems full as soon as that many gradients have come, whosever they are."""
    last, arrived, started = buckets[-1], [], []

    def on_gradient(parameter):
        arrived.append(parameter)
        if len(arrived) == len(last):
            flat = parameters_to_vector([p.grad for p in last]) / dist.get_world_size()
            started.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for flat, work in started:
            work.wait()
            vector_to_parameters(flat, [p.grad for p in last])
        arrived.clear(), started.clear()

    for parameter in sum(buckets, []):
        parameter.register_post_accumulate_grad_hook(on_gradient)
    return finish


def _as_many(arrived, bucket):
    return len(arrived) == len(bucket)


_LATE = (
    "Every hook sees the last bucket. Is there a lambda or a function in your loop? It looks the "
    "loop's variable up when it is called, and by then that is the last bucket."
)
_BIND = "Bind it with functools.partial(f, bucket), or with a default argument."
_COUNTED = (
    "Your second step starts no all_reduce: what you counted in the first is still there. Set it "
    "back in finish()."
)
_ARRIVED = (
    "The first step is right; in the second a bucket counts as full at its first gradient: forget "
    "in finish() who has arrived."
)


HOOKS = Exercise(
    id="04-hooks",
    title="Communicate while backward runs",
    task="Start each bucket's all_reduce in a hook; return a function that finishes them.",
    points={"all": 5},
    reference=overlap,
    library=(DDP.__init__,),
    alternatives=(_overlap_by_counting,),
    cases=(small_model.job([2, 3, 1], 2, seed=1, buckets=[[3, 2], [1, 0]]),),
    fresh=lambda rng: [
        small_model.job(
            [2, rng.randint(2, 5), 3, 1], 3, rng.randrange(10**6), buckets=[[5, 4, 3], [2, 1], [0]]
        )
    ],
    run=small_model.on_small_model(small_model.overlapped),
    compare=small_model.near,
    nudge="In the hook: note the parameter; if its bucket is now whole, flatten, divide, "
    "all_reduce with async_op=True, and keep the work. In finish: wait, and write back.",
    misconceptions=(
        Misconception(
            "one all_reduce for each parameter",
            lambda buckets: overlap([[p] for bucket in buckets for p in bucket]),
            "The numbers are right, but each parameter has its own all_reduce, and each pays the "
            "latency. One for each bucket is asked for.",
            "parameters_to_vector makes one flat tensor of a bucket's gradients.",
        ),
        Misconception(
            "one all_reduce for all",
            lambda buckets: overlap([sum(buckets, [])]),
            "All gradients travel in one all_reduce, which can start only when the last is ready: "
            "nothing is hidden behind backward.",
        ),
        Misconception(
            "waits in the hook",
            _overlap(wait_in_hook=True),
            "Your hook waits for its all_reduce, so backward stands still until it is done: there "
            "is no overlap. Start it in the hook, wait in finish().",
            "async_op=True, and no work.wait() before finish().",
        ),
        Misconception(
            "all in finish",
            _overlap(in_hook=False),
            "Nothing is sent before backward has ended: you start the all_reduces in finish(). A "
            "bucket that is full can go at once, while backward computes the next.",
            "The hook that brings the last gradient of a bucket starts its all_reduce.",
        ),
        Misconception(
            "forgets to wait",
            _overlap(wait=False),
            "You never wait for the all_reduces. They go on in the background, and whoever reads "
            "the gradients finds the sum, or a part of it, by chance.",
            "work.wait() in finish(), before the result is used.",
        ),
        Misconception(
            "the last bucket stays",
            lambda buckets: overlap(buckets[:-1]),
            "The last bucket is never sent: its parameters keep this rank's own gradient.",
            "A bucket is full when its own last gradient has come, not when the next one begins.",
        ),
        Misconception(
            "every hook has the last bucket",
            _late_binding,
            _LATE,
            _BIND,
        ),
        Misconception(
            "every hook has the last bucket, and counts",
            _late_binding_and_a_count,
            _LATE,
            _BIND,
        ),
        Misconception(
            "hook before accumulation",
            _overlap(register="register_hook"),
            "Your hook runs before the gradient is added to parameter.grad, so what you send is "
            "the old one: register_hook is called with a gradient on its way.",
            "register_post_accumulate_grad_hook is called when parameter.grad is complete.",
        ),
        Misconception(
            "starts with the first gradient",
            _overlap(ready=lambda arrived, bucket: len(arrived) == 1),
            "You send a bucket when its first gradient has come; the others in it are still those "
            "of the step before.",
            "Send it when all of its parameters have come.",
        ),
        Misconception(
            "SUM instead of AVG",
            _overlap(share=lambda: 1),
            "This is the SUM over the ranks: divide by their number, once.",
        ),
        Misconception(
            "divided twice",
            _overlap(share=lambda: dist.get_world_size() ** 2),
            "You divide by the number of ranks twice.",
        ),
        Misconception(
            "never written back",
            _overlap(write=False),
            "The averages lie in flat tensors, and parameter.grad still holds this rank's own "
            "gradient. parameters_to_vector copies; the way back is yours to go.",
            "vector_to_parameters(flat, [p.grad for p in bucket]) in finish().",
        ),
        Misconception(
            "the count goes on",
            _overlap(ready=_as_many, reset=False),
            _COUNTED,
        ),
        Misconception(
            "the count goes on, and the works stay",
            _overlap(ready=_as_many, reset=False, forget=False),
            _COUNTED,
        ),
        Misconception(
            "the set of arrivals stays",
            _overlap(reset=False),
            _ARRIVED,
        ),
        Misconception(
            "the set of arrivals and the works stay",
            _overlap(reset=False, forget=False),
            _ARRIVED,
        ),
        Misconception(
            "the works stay",
            _overlap(forget=False),
            "In the second step you wait for the first step's all_reduces again: forget in "
            "finish() what you have waited for, or the list grows with every step.",
        ),
        Misconception(
            "returns nothing",
            lambda buckets: None,
            "overlap must return the function finish; yours returned None.",
            "return finish, without parentheses: it is called after each backward.",
        ),
    ),
)
