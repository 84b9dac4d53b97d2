"""Wrong answers to 07-gather, and what they are made of."""

import torch
import torch.distributed as dist

from grading.exercises.zero3_on_ranks import padded, piece_of


def once(unit):
    """Gathered when it is empty: at the first forward, and never again, as it is not freed."""
    shards = {p: piece_of(p) for p in unit.parameters()}

    def gather(*_):
        for p, shard in shards.items():
            if not p.untyped_storage().nbytes():
                whole = shard.new_empty(dist.get_world_size() * len(shard))
                dist.all_gather_single(whole, shard)
                write(p, whole)

    for p in shards:
        resize(p)
    unit.register_forward_pre_hook(gather)
    return shards


def early_copies(unit):
    """Gathers copies of the shards, made when they were: no update reaches them."""
    gathered = shard_forward()(unit)
    returned = dict(gathered)
    gathered.update({p: shard.clone() for p, shard in gathered.items()})
    return returned


def whole_buffers(unit):
    """Gathers into buffers that are made once, and stay."""
    shards = {p: piece_of(p) for p in unit.parameters()}
    buffers = {p: shard.repeat(dist.get_world_size()) for p, shard in shards.items()}

    def gather(*_):
        for p, shard in shards.items():
            dist.all_gather_single(buffers[p], shard)
            write(p, buffers[p])

    def free(*_):
        for p in shards:
            resize(p)

    free()
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
    return shards


def unwritten(p, whole):
    p.untyped_storage().resize_(p.nbytes)


def slice(p):
    """A view, which keeps the whole copy behind it."""
    return padded(p).clone().chunk(dist.get_world_size())[dist.get_rank()]


def short(p):
    size = p.numel() // dist.get_world_size()
    return p.detach().flatten()[dist.get_rank() * size :][:size].clone()


def write_short(p, whole):
    p.untyped_storage().resize_(p.nbytes)
    p.data.zero_()
    p.data.view(-1)[: len(whole)].copy_(whole[: p.numel()])


def module_by_module(unit):
    for module in unit.modules():
        yield from module.parameters(recurse=False)


def all_reduced(unit):
    """Each rank puts its piece into zeros, and they are added up."""
    shards = {p: piece_of(p) for p in unit.parameters()}

    def gather(*_):
        for p, shard in shards.items():
            whole = shard.new_zeros(dist.get_world_size() * len(shard))
            whole.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)
            dist.all_reduce(whole)
            write(p, whole)

    def free(*_):
        for p in shards:
            resize(p)

    free()
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
    return shards


def resize(p):
    p.untyped_storage().resize_(0)


def write(p, whole):
    p.untyped_storage().resize_(p.nbytes)
    p.data.copy_(whole[: p.numel()].view_as(p))


def write_in_place(p, whole):
    p.untyped_storage().resize_(p.nbytes)
    with torch.no_grad():
        p.copy_(whole[: p.numel()].view_as(p))


def point_to(p, whole):
    p.data = whole[: p.numel()].view(p.data.shape)


def empty(p):
    p.data = torch.empty(0)


def shard_forward(
    of=piece_of,
    free=resize,
    write=write,
    at_first=True,
    gathers=True,
    frees=True,
    found=None,
    later=False,
):
    """The reference with one thing wrong. `found(unit)`: the parameters that it gathers."""

    def answer(unit):
        shards = {p: of(p) for p in unit.parameters()}
        order = list(found(unit)) if found else list(shards)
        shapes = {p: p.shape for p in shards}

        def free_all(*_):
            for p in order:
                free(p)

        def gather(*_):
            for p in order:
                whole = shards[p].new_empty(dist.get_world_size() * len(shards[p]))
                dist.all_gather_single(whole, shards[p].contiguous(), async_op=later)
                if write is point_to:
                    p.data = whole[: shapes[p].numel()].view(shapes[p])
                else:
                    write(p, whole)

        if at_first:
            free_all()
        if gathers:
            unit.register_forward_pre_hook(gather)
        if frees:
            unit.register_forward_hook(free_all)
        return shards

    return answer
