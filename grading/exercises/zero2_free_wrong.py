"""Wrong answers to 06-free: each is a function `answer(flat, shard)`, as the exercise asks."""

from collections import Counter

import torch
import torch.distributed as dist

from grading.exercises.zero2_on_ranks import each_part


def flat_buffer(flat, shard):
    """All buckets are views of one buffer [N·S], made by the first gradient of a backward."""
    buffer, sent = [], []

    def new(bucket):
        if not buffer:
            buffer.append(torch.zeros(flat.shard_size * dist.get_world_size()))
        return buffer[0][bucket.start :][: bucket.size]

    def collective(piece, whole):
        dist.reduce_scatter_single(piece, whole)
        sent.append(1)
        if len(sent) == len(flat.buckets):
            sent.clear(), buffer.clear()

    reference_but(new=new, collective=collective)(flat, shard)


def till_the_end(keep):
    """`keep(gradient, whole)`: what stays until the last hook of each backward."""

    def answer(flat, shard):
        kept, came = [], []

        def on_gradient(parameter):
            came.append(1)
            kept.append(keep(parameter.grad, None))
            if len(came) == len(flat.parameters):
                came.clear(), kept.clear()

        def collective(piece, whole):
            dist.reduce_scatter_single(piece, whole)
            kept.append(keep(None, whole))

        for parameter in flat.parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)
        reference_but(collective=collective)(flat, shard)

    return answer


def sent_by_the_last(flat, shard):
    """Gradients are copied and freed, and all buckets wait for the last hook."""
    wholes, came = {}, []

    def on_gradient(parameter):
        came.append(1)
        for bucket in flat.buckets:
            for part in bucket.parts:
                if part.parameter is parameter:
                    whole = wholes.setdefault(bucket, torch.zeros(bucket.size))
                    whole[part.place] = part.of(parameter.grad) / dist.get_world_size()
        parameter.grad = None
        if len(came) == len(flat.parameters):
            for bucket in flat.buckets:
                dist.reduce_scatter_single(shard[bucket.in_shard], wholes[bucket])
            wholes.clear(), came.clear()

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def freed_with_the_first_bucket(flat, shard):
    """A bucket waits until all its gradients are there, and frees them; one may be in two."""

    def on_gradient(_):
        for bucket in flat.buckets:
            if all(part.parameter.grad is not None for part in bucket.parts):
                whole = torch.zeros(bucket.size)
                for part in bucket.parts:
                    whole[part.place] = part.of(part.parameter.grad) / dist.get_world_size()
                dist.reduce_scatter_single(shard[bucket.in_shard], whole)
                for part in bucket.parts:
                    part.parameter.grad = None

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def reference_but(
    free=True,
    keep=None,
    pop=True,
    share=dist.get_world_size,
    full=lambda count, bucket: count == len(bucket.parts),
    reset=True,
    collective=dist.reduce_scatter_single,
    new=lambda bucket: torch.zeros(bucket.size),
):
    """The reference with one thing wrong. `keep(parameter, part)`: what a list keeps."""

    def answer(flat, shard):
        places = [(bucket, part) for bucket in flat.buckets for part in bucket.parts]
        wholes, arrived, kept = {}, Counter(), []

        def on_gradient(parameter):
            for bucket, part in places:
                if part.parameter is parameter:
                    if bucket not in wholes:
                        wholes[bucket] = new(bucket)
                    whole = wholes[bucket]
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


def all_reduce(piece, whole):
    dist.all_reduce(whole)
    piece.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def not_waited(piece, whole):
    dist.reduce_scatter_single(piece, whole, async_op=True)


def first_piece(piece, whole):
    dist.reduce_scatter_single(torch.empty_like(piece), whole)


def ddp(flat, shard):
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


def freed_alone(flat, shard):
    def on_gradient(parameter):
        parameter.grad = None

    for parameter in flat.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)


def a_bucket_for_each_gradient(flat, shard):
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


def at_the_end(flat, shard):
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
