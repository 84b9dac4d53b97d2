"""Wrong answers to 07-backward, and what they are made of."""

import torch
import torch.distributed as dist

from grading.exercises.zero3_on_ranks import padded


def scatter(shard, whole):
    dist.reduce_scatter_single(shard, whole)


def all_reduce(shard, whole):
    dist.all_reduce(whole)
    own(shard, whole)


def own(shard, whole):
    shard.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def add(sums, p, shard):
    sums[p] = sums.get(p, 0) + shard


def overwrite(sums, p, shard):
    sums[p] = shard


def not_waited(shard, whole):
    dist.reduce_scatter_single(shard, whole, async_op=True)


def shard_backward(
    gathers=lambda unit, gather: unit.register_full_backward_pre_hook(lambda *_: gather()),
    last=lambda count, trained, unit: count == len(trained),
    frees=True,
    frees_gradient=True,
    divisor=dist.get_world_size,
    collective=scatter,
    keep=add,
    pad=padded,
):
    """The reference with one thing wrong. `last(count, …)`: is this gradient the last one?"""

    def answer(unit, gather, free):
        trained = [p for p in unit.parameters() if p.requires_grad]
        sums, arrived = {}, []

        def on_gradient(p):
            whole = pad(p.grad) / divisor()
            shard = whole.new_empty(len(whole) // dist.get_world_size())
            collective(shard, whole)
            keep(sums, p, shard)
            if frees_gradient:
                p.grad = None
            arrived.append(p)
            if frees and last(len(arrived), trained, unit):
                free()
            if len(arrived) == len(trained):
                arrived.clear()

        gathers(unit, gather)
        for p in trained:
            p.register_post_accumulate_grad_hook(on_gradient)
        return sums

    return answer


def freed_by_the_module_hook(unit, gather, free):
    sums = shard_backward(frees=False)(unit, gather, free)
    unit.register_full_backward_hook(lambda *_: free())
    return sums


def gathered_at_each_gradient(unit, gather, free):
    """The module's hook is forgotten; a gradient's comes too late for what it was made of."""
    sums = {}
    for p in unit.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _: gather())
    sums = shard_backward(gathers=lambda *_: None)(unit, gather, free)
    return sums


def whole_sums(unit, gather, free):
    """Whole gradients are summed over micro-batches, and each time all of the sum is reduced."""
    totals = {}

    def keep(sums, p, shard):
        sums[p] = shard

    def on_gradient(p):
        totals[p] = p.grad = p.grad + totals[p] if p in totals else p.grad.clone()

    for p in unit.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(on_gradient)
    return shard_backward(keep=keep)(unit, gather, free)


def without_zeros(unit, gather, free):
    """Sums begin with whatever is in new memory."""

    def keep(sums, p, shard):
        sums[p] = (sums[p] if p in sums else torch.empty_like(shard)) + shard

    return shard_backward(keep=keep)(unit, gather, free)


def dropped(tensor):
    """Without the padding, and without the elements that then are left over."""
    n = dist.get_world_size()
    short = tensor.numel() // n * n
    return tensor.detach().flatten()[:short].clone()
