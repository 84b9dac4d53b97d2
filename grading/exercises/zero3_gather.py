"""Lesson 07, 07-gather: a unit's parameters are whole in its forward, and there alone."""

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.unit import Unit
from course_lib.sharded.zero3 import ZeRO3
from grading.exercises import small_model, zero3_on_ranks
from grading.exercises.zero3_on_ranks import padded, piece_of


def shard_forward(unit):
    shards = {p: piece_of(p) for p in unit.parameters()}

    def free(*_):
        for p in shards:
            p.untyped_storage().resize_(0)

    def gather(*_):
        for p, shard in shards.items():
            whole = shard.new_empty(dist.get_world_size() * len(shard))  # [N·s]
            dist.all_gather_single(whole, shard)
            p.untyped_storage().resize_(p.nbytes)
            p.data.copy_(whole[: p.numel()].view_as(p))

    free()
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
    return shards


def _as_one_collective(unit):
    """A different way to the same: one all_gather for the unit, of its shards side by side."""
    parameters = list(unit.parameters())
    shard = torch.cat([piece_of(p) for p in parameters])  # [S]
    pieces = shard.split([-(-p.numel() // dist.get_world_size()) for p in parameters])

    def free(*_):
        for p in parameters:
            p.data.untyped_storage().resize_(0)

    def gather(*_):
        rows = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, shard)
        columns = torch.stack(rows).split([len(piece) for piece in pieces], dim=1)  # [N, s] each
        for p, column in zip(parameters, columns, strict=True):
            p.untyped_storage().resize_(p.nbytes)
            p.data.view(-1).copy_(column.reshape(-1)[: p.numel()])

    free()
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
    return dict(zip(parameters, pieces, strict=True))


class _BySpaces:
    """Another: parameters are views of spaces that stay, and empty tensors between."""

    def __init__(self, unit):
        self.shards = {p: piece_of(p) for p in unit.parameters()}
        self.spaces = {p: padded(p).clone() for p in self.shards}
        self.views = {p: space[: p.numel()].view(p.shape) for p, space in self.spaces.items()}
        self.free()
        unit.register_forward_pre_hook(self.gather)
        unit.register_forward_hook(self.free, always_call=True)

    def gather(self, *_):
        for p, space in self.spaces.items():
            space.untyped_storage().resize_(space.nbytes)
            dist.all_gather_single(space, self.shards[p])
            p.data = self.views[p]

    def free(self, *_):
        for p, space in self.spaces.items():
            p.data = torch.empty(0)
            space.untyped_storage().resize_(0)


def _by_spaces(unit):
    return _BySpaces(unit).shards


def _resize(p):
    p.untyped_storage().resize_(0)


def _write(p, whole):
    p.untyped_storage().resize_(p.nbytes)
    p.data.copy_(whole[: p.numel()].view_as(p))


def _write_in_place(p, whole):
    p.untyped_storage().resize_(p.nbytes)
    with torch.no_grad():
        p.copy_(whole[: p.numel()].view_as(p))


def _point_to(p, whole):
    p.data = whole[: p.numel()].view(p.data.shape)


def _shard_forward(
    of=piece_of,
    free=_resize,
    write=_write,
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
                if write is _point_to:
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


def _once(unit):
    """Gathered when it is empty: at the first forward, and never again, as it is not freed."""
    shards = {p: piece_of(p) for p in unit.parameters()}

    def gather(*_):
        for p, shard in shards.items():
            if not p.untyped_storage().nbytes():
                whole = shard.new_empty(dist.get_world_size() * len(shard))
                dist.all_gather_single(whole, shard)
                _write(p, whole)

    for p in shards:
        _resize(p)
    unit.register_forward_pre_hook(gather)
    return shards


def _slice(p):
    """A view, which keeps the whole copy behind it."""
    return padded(p).clone().chunk(dist.get_world_size())[dist.get_rank()]


def _short(p):
    size = p.numel() // dist.get_world_size()
    return p.detach().flatten()[dist.get_rank() * size :][:size].clone()


def _write_short(p, whole):
    p.untyped_storage().resize_(p.nbytes)
    p.data.zero_()
    p.data.view(-1)[: len(whole)].copy_(whole[: p.numel()])


def _module_by_module(unit):
    for module in unit.modules():
        yield from module.parameters(recurse=False)


def _all_reduced(unit):
    """Each rank puts its piece into zeros, and they are added up."""
    shards = {p: piece_of(p) for p in unit.parameters()}

    def gather(*_):
        for p, shard in shards.items():
            whole = shard.new_zeros(dist.get_world_size() * len(shard))
            whole.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)
            dist.all_reduce(whole)
            _write(p, whole)

    def free(*_):
        for p in shards:
            _resize(p)

    free()
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
    return shards


def _returns_nothing(unit):
    shard_forward(unit)


def _empty(p):
    p.data = torch.empty(0)


GATHER = Exercise(
    id="07-gather",
    title="Gather before forward, free after it",
    task="Keep this rank's shards; register hooks that gather before the unit's forward and free "
    "after it.",
    points={"all": 5},
    reference=shard_forward,
    library=(Unit.__init__, ZeRO3.__init__),
    alternatives=(_as_one_collective, _by_spaces),
    cases=(zero3_on_ranks.job(15, 3, 2, seed=1),),
    fresh=lambda rng: [
        zero3_on_ranks.job(rng.choice((16, 17)), 3, 3, rng.randrange(10**6), tied=True)
    ],
    run=small_model.on_small_model(zero3_on_ranks.gathered),
    compare=zero3_on_ranks.near,
    nudge="shards = {p: piece_of(p) for p in unit.parameters()}. In the pre-hook, for each p: "
    "all_gather its shards, resize p's storage to p.nbytes, copy through p.data. In the forward "
    "hook, and once at the start: resize the storage to 0.",
    misconceptions=(
        Misconception(
            "DDP under another name",
            _shard_forward(at_first=False, gathers=False, frees=False),
            "This is DDP under another name: the parameters are whole on every rank, all the time, "
            "and what you return is a copy that nobody reads. Free them, and gather in forward.",
        ),
        Misconception(
            "never freed",
            _shard_forward(frees=False),
            "You gather, and never free: after the first forward every unit is whole on every "
            "rank, and stays so.",
            "unit.register_forward_hook(free), where free resizes each storage to 0.",
        ),
        Misconception(
            "gathered once",
            _once,
            "You gather when a parameter is empty, and never free it: all units stay whole, and "
            "after the optimizer's step they hold old values.",
            "Free after each forward; then each forward gathers what is new.",
        ),
        Misconception(
            "whole until the first forward",
            _shard_forward(at_first=False),
            "Between its forwards a unit is empty, but until its first one it is whole: a model "
            "that does not fit would not get that far. Free it at once, too.",
        ),
        Misconception(
            "a new tensor in p.data",
            _shard_forward(free=_empty, write=_point_to),
            "The parameters are empty after forward, and their memory is still there: autograd has "
            "saved them for backward, and p.data = … leaves what it saved as it is.",
            "Resize the storage, p.untyped_storage().resize_(0): autograd's views of it become "
            "empty with it.",
        ),
        Misconception(
            "a new tensor at each gather",
            _shard_forward(write=_point_to),
            "Each gather puts a new tensor into p.data, and what autograd saved in forward is a "
            "view of the last one, whose storage you emptied: in backward it would still be empty.",
            "Give p's own storage its bytes back, resize_(p.nbytes), and copy into it.",
        ),
        Misconception(
            "written in sight of autograd",
            _shard_forward(write=_write_in_place),
            "You write with p.copy_(…), which autograd sees, no_grad or not: in backward it would "
            "refuse what it saved as 'modified by an inplace operation'.",
            "p.data.copy_(…) writes the same memory behind its back.",
        ),
        Misconception(
            "a shard that is a view",
            _shard_forward(of=_slice),
            "Your shard is a view of a copy of the whole parameter, and keeps all of it alive: N "
            "times what you need.",
            "Clone the piece; piece_of does.",
        ),
        Misconception(
            "padding lost",
            _shard_forward(of=_short, write=_write_short),
            "The last elements of a parameter belong to nobody: its size is no multiple of N here. "
            "Round a shard's size up, and pad.",
            "piece_of pads; after the gather, whole[: p.numel()] drops the padding.",
        ),
        Misconception(
            "tied weight gathered twice",
            _shard_forward(found=_module_by_module),
            "A weight that two layers of the unit share is gathered twice: you go module by "
            "module. unit.parameters() gives each parameter once.",
        ),
        Misconception(
            "freed, and not gathered",
            _shard_forward(gathers=False),
            "You free the parameters and never gather them: layers compute on empty storages.",
            "unit.register_forward_pre_hook(gather) runs before each forward.",
        ),
        Misconception(
            "does not wait",
            _shard_forward(later=True),
            "You copy out of a gather that you started with async_op=True and did not wait for: "
            "what has come by then is chance.",
            "Leave async_op out here; the library gathers ahead, and waits before it copies.",
        ),
        Misconception(
            "returns nothing",
            _returns_nothing,
            "shard_forward must return {parameter: shard}, which the optimizer will update; yours "
            "returned None.",
        ),
        Misconception(
            "all_reduce of padded pieces",
            _all_reduced,
            "The numbers are right, but an all_reduce of pieces in zeros sends twice the bytes of "
            "an all_gather: it adds up, where there is nothing to add.",
        ),
    ),
)
