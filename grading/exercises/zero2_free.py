"""Lesson 06, 06-free: reduce gradients as they become ready, and keep none of them."""

from collections import Counter

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.zero2 import ZeRO2
from grading.exercises import small_model, zero2_on_ranks
from grading.exercises import zero2_free_wrong as wrong


def reduce_and_free(flat, shard):
    places = [(bucket, part) for bucket in flat.buckets for part in bucket.parts]
    wholes, arrived = {}, Counter()

    def on_gradient(parameter):
        for bucket, part in places:
            if part.parameter is parameter:
                whole = wholes.setdefault(bucket, torch.zeros(bucket.size))
                whole[part.place] = part.of(parameter.grad) / dist.get_world_size()
                arrived[bucket] += 1
                if arrived[bucket] == len(bucket.parts):
                    dist.reduce_scatter_single(shard[bucket.in_shard], wholes.pop(bucket))
                    del arrived[bucket]
        parameter.grad = None

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


class _ByOwnership:
    """A different way to the same: gradients wait for their last bucket, and are freed then."""

    def __init__(self, flat, shard):
        self.flat, self.shard, self.sent = flat, shard, set()
        for parameter in flat.parameters:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, _):
        for bucket in self.flat.buckets:
            there = all(part.parameter.grad is not None for part in bucket.parts)
            if bucket not in self.sent and there:
                gradients = torch.cat([part.of(part.parameter.grad) for part in bucket.parts])
                whole = torch.zeros(bucket.size)
                whole[: len(gradients)] = gradients
                piece = torch.empty(bucket.size // dist.get_world_size())
                dist.reduce_scatter_single(piece, whole)
                self.shard[bucket.in_shard] += piece / dist.get_world_size()
                self.sent.add(bucket)
        waiting = [b for b in self.flat.buckets if b not in self.sent]
        needed = {part.parameter for bucket in waiting for part in bucket.parts}
        for parameter in self.flat.parameters:
            if parameter not in needed:
                parameter.grad = None
        if not waiting:
            self.sent.clear()


_KEPT = (
    "grad is None, and yet every whole gradient is still in memory: something else refers to it. A "
    "list, a dict, a closure, or a view: part.of(…) is one, and keeps the whole tensor alive."
)
_COPY = "Copy the numbers into the bucket, and keep no tensor that backward gave you."
_PEAK = (
    "Gradients are freed, but as much stays until backward ends: the buffers of all buckets, each "
    "by itself or as slices of one buffer, which any slice keeps whole; or copies of gradients. By "
    "the last gradient that is a whole copy again, and it is the peak that must fit."
)
_BUFFER = (
    "Drop your last reference to the bucket's buffer when you send it; make it at its first "
    "gradient, and copy gradients to nowhere else."
)
_RESET = (
    "In the second backward nothing is reduced: what you counted in the first is still there. A "
    "bucket that was sent begins anew."
)

FREE = Exercise(
    id="06-free",
    title="Reduce and free as backward goes on",
    task="Register hooks: a gradient goes into its buckets and is freed; full buckets are reduced.",
    points={"all": 5},
    reference=reduce_and_free,
    library=(ZeRO2.__init__,),
    alternatives=(_ByOwnership,),
    cases=(small_model.job([*[6] * 7, 3], 2, seed=1, steps=2, bucket=24),),
    fresh=lambda rng: [
        small_model.job([*[rng.choice((6, 7))] * 7, 2], 3, rng.randrange(10**6), steps=2, bucket=30)
    ],
    run=small_model.on_small_model(zero2_on_ranks.freed),
    compare=zero2_on_ranks.near,
    nudge="In the hook: for each bucket that has a part of this parameter, copy the part into the "
    "bucket's zeros and count it; if that was the last, reduce and forget the bucket. Then "
    "parameter.grad = None. register_post_accumulate_grad_hook calls it when grad is complete.",
    misconceptions=(
        Misconception(
            "DDP under another name",
            wrong.ddp,
            "This is DDP under another name: you all_reduce whole gradients, and they all stay. "
            "Only this rank's shard of the mean is needed: reduce_scatter each bucket, and free.",
        ),
        Misconception(
            "all_reduce of buckets",
            wrong.reference_but(collective=wrong.all_reduce),
            "The numbers and the memory are right, but you all_reduce each bucket, and throw away "
            "all but a piece: twice the bytes. reduce_scatter sends what is needed.",
        ),
        Misconception(
            "never freed",
            wrong.reference_but(free=False),
            "The shard is right, but whole gradients are still in grad: nothing was saved.",
            "When its parts are copied, parameter.grad = None, in the hook.",
        ),
        Misconception(
            "kept by a view",
            wrong.reference_but(keep=lambda parameter, part: part.of(parameter.grad)),
            _KEPT,
            _COPY,
        ),
        Misconception(
            "buckets kept",
            wrong.reference_but(pop=False),
            "Gradients are freed, but the buckets into which you copied them are all still alive: "
            "that is a whole copy again. A bucket that was reduced is needed no more.",
            _BUFFER,
        ),
        Misconception(
            "one flat buffer",
            wrong.flat_buffer,
            _PEAK,
            _BUFFER,
        ),
        Misconception(
            "buckets kept till the end of backward",
            wrong.till_the_end(lambda gradient, whole: whole),
            _PEAK,
            _BUFFER,
        ),
        Misconception(
            "copies kept till the end of backward",
            wrong.till_the_end(lambda gradient, whole: whole is None and gradient.clone()),
            _PEAK,
            _BUFFER,
        ),
        Misconception(
            "all buckets leave in the last hook",
            wrong.sent_by_the_last,
            "Right numbers, but nothing left before backward ended: send a bucket as soon as its "
            "last part is in.",
        ),
        Misconception(
            "freed with its first bucket",
            wrong.freed_with_the_first_bucket,
            "You wait until all gradients of a bucket are there, and free them then. One that lies "
            "in two buckets is gone before the second has it, which then never leaves.",
            "Copy a gradient into all of its buckets, then free it.",
        ),
        Misconception(
            "reduced at the end",
            wrong.at_the_end,
            "You wait for the last gradient, and reduce and free then: by that time all whole "
            "gradients were alive at once, as in ZeRO-1. Send a bucket when its last part comes.",
        ),
        Misconception(
            "SUM for AVG",
            wrong.reference_but(share=lambda: 1),
            "This is the SUM over the ranks: divide by their number, once.",
        ),
        Misconception(
            "sent at the first gradient",
            wrong.reference_but(full=lambda count, bucket: count == 1),
            "You send a bucket when the first of its gradients has come: the others are missing "
            "in it.",
            "Count what has arrived against len(bucket.parts).",
        ),
        Misconception(
            "a bucket for each gradient",
            wrong.a_bucket_for_each_gradient,
            "The numbers are right, but each gradient travels in buckets of its own, which hold "
            "zeros elsewhere: more bytes, and a latency for each. Gradients share a bucket.",
            "Keep a bucket's tensor in a dict until all of its parts are there.",
        ),
        Misconception(
            "freed, and never reduced",
            wrong.freed_alone,
            "Gradients are freed, and nothing was sent: what they said is lost. First their parts "
            "go into buckets, and full buckets to their owners.",
        ),
        Misconception(
            "the count goes on",
            wrong.reference_but(reset=False),
            _RESET,
            "Set what you count of a bucket back to 0 when you send it.",
        ),
        Misconception(
            "padding is what was in memory",
            wrong.reference_but(new=lambda bucket: torch.empty(bucket.size)),
            "The padding of the last bucket is whatever was in memory: torch.empty promises no "
            "values, and what it gives may be zeros today.",
            "A bucket has bucket.size elements, its parts may fill fewer: start from zeros.",
        ),
        Misconception(
            "does not wait",
            wrong.reference_but(collective=wrong.not_waited),
            "You do not wait for every reduce_scatter that you start with async_op=True: who reads "
            "the shard finds the mean, or a part of it, by chance.",
            "Leave async_op out here; the library keeps each work and waits for it later.",
        ),
        Misconception(
            "the result goes nowhere",
            wrong.reference_but(collective=wrong.first_piece),
            "You reduce into a new tensor, and `shard` is as it was: the pieces belong into "
            "shard[bucket.in_shard].",
        ),
    ),
)
