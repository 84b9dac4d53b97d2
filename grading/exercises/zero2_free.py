"""Lesson 06, 06-free: reduce gradients as they become ready, and keep none of them."""

from collections import Counter

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.zero2 import ZeRO2
from grading.exercises import small_model, zero2_on_ranks
from grading.exercises.zero2_on_ranks import each_part


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


def _reduce_and_free(
    free=True,
    keep=None,
    pop=True,
    share=dist.get_world_size,
    full=lambda count, bucket: count == len(bucket.parts),
    reset=True,
    collective=dist.reduce_scatter_single,
    zeros=True,
):
    """The reference with one thing wrong. `keep(parameter, part)`: what a list keeps."""

    def answer(flat, shard):
        places = [(bucket, part) for bucket in flat.buckets for part in bucket.parts]
        wholes, arrived, kept = {}, Counter(), []

        def on_gradient(parameter):
            for bucket, part in places:
                if part.parameter is parameter:
                    whole = wholes.setdefault(bucket, torch.zeros(bucket.size))
                    whole[part.place] = part.of(parameter.grad) / share()
                    arrived[bucket] += 1
                    if keep:
                        kept.append(keep(parameter, part))
                    if full(arrived[bucket], bucket):
                        collective(shard[bucket.in_shard], wholes[bucket])
                        if pop:
                            del wholes[bucket]
                        else:
                            kept.append(wholes.pop(bucket))
                    if arrived[bucket] == len(bucket.parts) and reset:
                        del arrived[bucket]
            if free:
                parameter.grad = None

        for parameter in flat.parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)

    return answer


def _all_reduce(piece, whole):
    dist.all_reduce(whole)
    piece.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def _async(piece, whole):
    dist.reduce_scatter_single(piece, whole, async_op=True)


def _first_piece(piece, whole):
    dist.reduce_scatter_single(torch.empty_like(piece), whole)


def _ddp(flat, shard):
    """As in lesson 04, an all_reduce for each gradient, which stays; the shard is cut from them."""
    arrived = []

    def on_gradient(parameter):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
        arrived.append(parameter)
        if len(arrived) == len(flat.parameters):
            each_part(flat, lambda _, whole, piece: _own(piece, whole), shard)
            arrived.clear()

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def _freed_alone(flat, shard):
    def on_gradient(parameter):
        parameter.grad = None

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def _a_bucket_for_each_gradient(flat, shard):
    """Each gradient goes at once, in buckets of its own, which are zero elsewhere."""

    def on_gradient(parameter):
        for bucket in flat.buckets:
            for part in bucket.parts:
                if part.parameter is parameter:
                    whole = torch.zeros(bucket.size)
                    whole[part.place] = part.of(parameter.grad) / dist.get_world_size()
                    piece = torch.empty(bucket.size // dist.get_world_size())
                    dist.reduce_scatter_single(piece, whole)
                    shard[bucket.in_shard] += piece
        parameter.grad = None

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def _own(piece, whole):
    piece.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def _at_the_end(flat, shard):
    """ZeRO-1: when the last gradient has come, all buckets are reduced; then all are freed."""
    arrived = []

    def on_gradient(parameter):
        arrived.append(parameter)
        if len(arrived) == len(flat.parameters):
            scatter = dist.reduce_scatter_single
            size = dist.get_world_size()
            each_part(flat, lambda _, whole, piece: scatter(piece, whole / size), shard)
            arrived.clear()
            for each in flat.parameters:
                each.grad = None

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def _padding_lost(flat, shard):
    """Buckets as long as their gradients: the last one leaves a rest, which reaches nobody."""
    size = dist.get_world_size()

    def collective(piece, whole):
        last = piece.data_ptr() == shard[flat.buckets[-1].in_shard].data_ptr()
        if last:
            filled = sum(part.place.stop - part.place.start for part in flat.buckets[-1].parts)
            short = filled // size
            whole, piece = whole[: short * size].clone(), piece[:short]
        dist.reduce_scatter_single(piece, whole)

    _reduce_and_free(collective=collective)(flat, shard)


_KEPT = (
    "grad is None, and yet every whole gradient is still in memory: something else refers to it. A "
    "list, a dict, a closure, or a view: part.of(…) is one, and keeps the whole tensor alive."
)
_COPY = "Copy the numbers into the bucket, and keep no tensor that backward gave you."
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
            _ddp,
            "This is DDP under another name: you all_reduce whole gradients, and they all stay. "
            "Only this rank's shard of the mean is needed: reduce_scatter each bucket, and free.",
        ),
        Misconception(
            "all_reduce of buckets",
            _reduce_and_free(collective=_all_reduce),
            "The numbers and the memory are right, but you all_reduce each bucket, and throw away "
            "all but a piece: twice the bytes. reduce_scatter sends what is needed.",
        ),
        Misconception(
            "never freed",
            _reduce_and_free(free=False),
            "The shard is right, but whole gradients are still in grad: nothing was saved.",
            "When its parts are copied, parameter.grad = None, in the hook.",
        ),
        Misconception(
            "kept in a list",
            _reduce_and_free(keep=lambda parameter, part: parameter.grad),
            _KEPT,
            _COPY,
        ),
        Misconception(
            "kept by a view",
            _reduce_and_free(keep=lambda parameter, part: part.of(parameter.grad)),
            _KEPT,
            _COPY,
        ),
        Misconception(
            "buckets kept",
            _reduce_and_free(pop=False),
            "Gradients are freed, but the buckets into which you copied them are all still alive: "
            "that is a whole copy again. A bucket that was reduced is needed no more.",
            "wholes.pop(bucket) takes it out of the dict as you send it.",
        ),
        Misconception(
            "reduced at the end",
            _at_the_end,
            "You wait for the last gradient, and reduce and free then: by that time all whole "
            "gradients were alive at once, as in ZeRO-1. Send a bucket when its last part comes.",
        ),
        Misconception(
            "SUM for AVG",
            _reduce_and_free(share=lambda: 1),
            "This is the SUM over the ranks: divide by their number, once.",
        ),
        Misconception(
            "divided twice",
            _reduce_and_free(share=lambda: dist.get_world_size() ** 2),
            "You divide by the number of ranks twice.",
        ),
        Misconception(
            "sent at the first gradient",
            _reduce_and_free(full=lambda count, bucket: count == 1),
            "You send a bucket when the first of its gradients has come: the others are missing "
            "in it.",
            "Count what has arrived against len(bucket.parts).",
        ),
        Misconception(
            "sent at every gradient",
            _reduce_and_free(full=lambda count, bucket: True),
            "You send a bucket each time a gradient comes into it, half filled at first. Send it "
            "once, when all of its parts are there.",
            "Count what has arrived against len(bucket.parts).",
        ),
        Misconception(
            "a bucket for each gradient",
            _a_bucket_for_each_gradient,
            "The numbers are right, but each gradient travels in buckets of its own, which hold "
            "zeros elsewhere: more bytes, and a latency for each. Gradients share a bucket.",
            "Keep a bucket's tensor in a dict until all of its parts are there.",
        ),
        Misconception(
            "freed, and never reduced",
            _freed_alone,
            "Gradients are freed, and nothing was sent: what they said is lost. First their parts "
            "go into buckets, and full buckets to their owners.",
        ),
        Misconception(
            "the count goes on",
            _reduce_and_free(reset=False),
            _RESET,
            "del arrived[bucket], or set it to 0, when you send it.",
        ),
        Misconception(
            "padding lost",
            _padding_lost,
            "The last elements of the last bucket reach nobody: without its padding it does not "
            "split into N equal pieces. bucket.size counts padding, the parts do not.",
            "Begin a bucket with torch.zeros(bucket.size).",
        ),
        Misconception(
            "does not wait",
            _reduce_and_free(collective=_async),
            "You do not wait for every reduce_scatter that you start with async_op=True: who reads "
            "the shard finds the mean, or a part of it, by chance.",
            "Leave async_op out here; the library keeps each work and waits for it later.",
        ),
        Misconception(
            "the result goes nowhere",
            _reduce_and_free(collective=_first_piece),
            "You reduce into a new tensor, and `shard` is as it was: the pieces belong into "
            "shard[bucket.in_shard].",
        ),
    ),
)
