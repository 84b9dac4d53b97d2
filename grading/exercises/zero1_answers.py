"""Answers to 05-update, an optimizer of which each rank has 1/N: right ones, then wrong ones.

Each is called with the model and `make_optimizer`, before training, and returns `update`.
"""

import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from grading.exercises.zero1_runs import all_padded, gather, mine, padded


def sharded_optimizer(model, make_optimizer):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = padded(model.parameters(), n).view(n, -1)  # [N, S]
    shard = nn.Parameter(rows[rank].clone())  # [S]
    optimizer = make_optimizer([shard])

    def update():
        gradients = padded([p.grad for p in model.parameters()], n)  # [N·S]
        shard.grad = torch.empty_like(shard)  # [S]
        dist.reduce_scatter_single(shard.grad, gradients / n)
        optimizer.step()
        return shard.detach()

    return update


def without_a_copy_between_steps(model, make_optimizer):
    """Another way: the shard is cut from the parameters at each update, and freed after it."""
    shard = nn.Parameter(torch.empty(0))
    optimizer = make_optimizer([shard])

    def update():
        shard.data = mine(all_padded(model.parameters()))
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter_single(shard.grad, all_padded([p.grad for p in model.parameters()]))
        shard.grad /= dist.get_world_size()
        optimizer.step()
        updated, shard.grad, shard.data = shard.data.clone(), None, torch.empty(0)
        return updated

    return update


def in_two_pieces(model, make_optimizer):
    """Another way: in parts, asynchronously, by torch's older reduce_scatter."""
    whole = mine(all_padded(model.parameters()))
    pieces = [nn.Parameter(piece.clone()) for piece in whole.chunk(2)]
    sizes = [len(piece) for piece in pieces]
    optimizer = make_optimizer(pieces)

    def update():
        rows = all_padded([p.grad / dist.get_world_size() for p in model.parameters()])
        parts = rows.view(dist.get_world_size(), -1).split(sizes, dim=1)  # of [N, S]
        works = []
        for piece, part in zip(pieces, parts, strict=True):
            piece.grad = torch.empty_like(piece)
            rows = [row.contiguous() for row in part]
            works.append(dist.reduce_scatter(piece.grad, rows, async_op=True))
        for work in works:
            work.wait()
        optimizer.step()
        return torch.cat([piece.detach() for piece in pieces])

    return update


def with_gradients_freed(model, make_optimizer):
    """Another way: whole gradients are let go once they are in the flat buffer."""
    n = dist.get_world_size()
    shard = nn.Parameter(mine(all_padded(model.parameters())).clone())
    optimizer = make_optimizer([shard])

    def update():
        whole = all_padded([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter_single(shard.grad, whole / n)
        optimizer.step()
        optimizer.zero_grad()
        return shard

    return update


def in_pieces_of_each_tensor(model, make_optimizer):
    """Another way: the optimizer sees each tensor's part of the shard; some have one element."""
    n = dist.get_world_size()
    own = mine(all_padded(model.parameters())).clone()
    size = len(own)  # S
    begin = dist.get_rank() * size  # of the shard, in the flat buffer
    ends = itertools.accumulate(p.numel() for p in model.parameters())
    inside = [end - begin for end in ends if 0 < end - begin < size]
    spans = [slice(*pair) for pair in itertools.pairwise([0, *inside, size])]
    pieces = [nn.Parameter(own[span].clone()) for span in spans]
    optimizer = make_optimizer(pieces)

    def update():
        mean = torch.empty(size)
        dist.reduce_scatter_single(mean, all_padded([p.grad for p in model.parameters()]) / n)
        for piece, span in zip(pieces, spans, strict=True):
            piece.grad = mean[span].clone()
        optimizer.step()
        return torch.cat([piece.detach() for piece in pieces])

    return update


def owners_of_whole_tensors(model, make_optimizer):
    """The tensors, dealt out to the ranks; each gradient is reduced to its owner."""
    rank, n = dist.get_rank(), dist.get_world_size()
    listed = list(model.parameters())
    own = listed[rank::n]
    optimizer = make_optimizer(own)

    def update():
        for index, parameter in enumerate(listed):
            dist.reduce(parameter.grad.div_(n), dst=index % n)
        optimizer.step()
        return parameters_to_vector(own).detach()

    return update


def of_each_layer(model):
    """As one who walks through the layers: a weight that two of them share comes twice."""
    return [p for layer in model.layers for p in (layer.weight, layer.bias)]


def with_one_thing_wrong(
    pad=all_padded,
    cut=lambda whole: mine(whole).clone(),
    reduce=lambda own, whole: dist.reduce_scatter_single(own, whole),
    share=dist.get_world_size,
    listed=lambda model: list(model.parameters()),
    into=lambda shard: setattr(shard, "grad", torch.empty_like(shard)) or shard.grad,
    new_optimizer=False,
    keep=False,
    returned=lambda model, shard: shard.detach(),
):
    """The reference with one thing wrong."""

    def answer(model, make_optimizer):
        kept = {}
        shard = nn.Parameter(cut(pad(listed(model))))
        make = functools.partial(make_optimizer, [shard])
        optimizer = make()

        def update():
            whole = pad([p.grad for p in listed(model)]) / share()
            kept.update(whole=whole if keep else None)
            reduce(into(shard), whole)
            (make() if new_optimizer else optimizer).step()
            return returned(model, shard)

        return update

    return answer


def ddp(model, make_optimizer):
    optimizer = make_optimizer(list(model.parameters()))

    def update():
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return mine(all_padded(model.parameters())).clone()

    return update


def ddp_in_one_tensor(model, make_optimizer):
    """DDP in one flat tensor."""
    whole = nn.Parameter(all_padded(model.parameters()))
    optimizer = make_optimizer([whole])

    def update():
        whole.grad = all_padded([p.grad for p in model.parameters()]) / dist.get_world_size()
        dist.all_reduce(whole.grad)
        optimizer.step()
        return mine(whole.detach()).clone()

    return update


def replicated_states(model, make_optimizer):
    """The gradient's shard goes where it belongs, but the optimizer has all parameters."""
    whole = nn.Parameter(all_padded(model.parameters()))
    optimizer = make_optimizer([whole])

    def update():
        whole.grad = torch.zeros_like(whole)
        gradients = all_padded([p.grad for p in model.parameters()]) / dist.get_world_size()
        dist.reduce_scatter_single(mine(whole.grad), gradients)
        optimizer.step()
        return mine(whole.detach()).clone()

    return update


def own_alone(own, whole):
    own.copy_(mine(whole))


def by_all_reduce(own, whole):
    dist.all_reduce(whole)
    own.copy_(mine(whole))


def rounded_down(tensors):
    flat = parameters_to_vector(tensors).detach()
    return flat[: len(flat) // dist.get_world_size() * dist.get_world_size()]


def gathered(model, shard):
    gather(model, shard)
    return shard.detach()
