"""Lesson 07, 07-gather: a unit's parameters are whole in its forward, and there alone."""

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.unit import Unit
from course_lib.sharded.zero3 import ZeRO3
from grading.exercises import small_model, zero3_on_ranks
from grading.exercises import zero3_gather_wrong as wrong
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


def _into_the_storage(unit):
    """Another: the parameter's storage has room for the padding, and is gathered into."""
    shards = {p: piece_of(p) for p in unit.parameters()}

    def free(*_):
        for p in shards:
            p.untyped_storage().resize_(0)

    def gather(*_):
        for p, shard in shards.items():
            size, storage = dist.get_world_size() * len(shard), p.untyped_storage()
            storage.resize_(size * p.itemsize)
            dist.all_gather_single(shard.new_empty(0).set_(storage, 0, (size,)), shard)

    free()
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free)
    return shards


def _returns_nothing(unit):
    shard_forward(unit)


GATHER = Exercise(
    id="07-gather",
    title="Gather before forward, free after it",
    task="Keep this rank's shards; register hooks that gather before the unit's forward and free "
    "after it.",
    points={"all": 5},
    reference=shard_forward,
    library=(Unit.__init__, ZeRO3.__init__),
    alternatives=(_as_one_collective, _by_spaces, _into_the_storage),
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
            wrong.shard_forward(at_first=False, gathers=False, frees=False),
            "This is DDP under another name: the parameters are whole on every rank, all the time, "
            "and what you return is a copy that nobody reads. Free them, and gather in forward.",
        ),
        Misconception(
            "never freed",
            wrong.shard_forward(frees=False),
            "You gather, and never free: after the first forward every unit is whole on every "
            "rank, and stays so.",
            "unit.register_forward_hook(free), where free resizes each storage to 0.",
        ),
        Misconception(
            "never freed, nor at first",
            wrong.shard_forward(at_first=False, frees=False),
            "You gather, and never free: after the first forward every unit is whole on every "
            "rank, and stays so.",
            "unit.register_forward_hook(free), where free resizes each storage to 0.",
        ),
        Misconception(
            "gathered once",
            wrong.once,
            "You gather when a parameter is empty, and never free it: all units stay whole, and "
            "after the optimizer's step they hold old values.",
            "Free after each forward; then each forward gathers what is new.",
        ),
        Misconception(
            "whole until the first forward",
            wrong.shard_forward(at_first=False),
            "Between its forwards a unit is empty, but until its first one it is whole: a model "
            "that does not fit would not get that far. Free it at once, too.",
        ),
        Misconception(
            "a new tensor in p.data",
            wrong.shard_forward(free=wrong.empty, write=wrong.point_to),
            "The parameters are empty after forward, and their memory is still there: autograd has "
            "saved them for backward, and p.data = … leaves what it saved as it is.",
            "Resize the storage, p.untyped_storage().resize_(0): autograd's views of it become "
            "empty with it.",
        ),
        Misconception(
            "a new tensor at each gather",
            wrong.shard_forward(write=wrong.point_to),
            "Each gather puts a new tensor into p.data, and what autograd saved in forward is a "
            "view of the last one, whose storage you emptied: in backward it would still be empty.",
            "Give p's own storage its bytes back, resize_(p.nbytes), and copy into it.",
        ),
        Misconception(
            "written in sight of autograd",
            wrong.shard_forward(write=wrong.write_in_place),
            "You write with p.copy_(…), which autograd sees, no_grad or not: in backward it would "
            "refuse what it saved as 'modified by an inplace operation'.",
            "p.data.copy_(…) writes the same memory behind its back.",
        ),
        Misconception(
            "a shard that is a view",
            wrong.shard_forward(of=wrong.slice),
            "Your shard is a view of a copy of the whole parameter, and keeps all of it alive: N "
            "times what you need.",
            "Clone the piece; piece_of does.",
        ),
        Misconception(
            "buffers that stay",
            wrong.whole_buffers,
            "The parameters are empty between forwards, and a second copy of them is not: you keep "
            "whole what you gathered, or a clone. Make the buffer in gather, and let it go there.",
        ),
        Misconception(
            "copies of shards gathered",
            wrong.early_copies,
            "You gather copies of the shards that you return: the optimizer updates those, and "
            "forward goes on with old values. Gather the shards themselves.",
        ),
        Misconception(
            "gathered, and not written",
            wrong.shard_forward(write=wrong.unwritten),
            "You give the storage its bytes back and write nothing: what is in them is chance.",
            "p.data.copy_(whole[: p.numel()].view_as(p))",
        ),
        Misconception(
            "padding lost",
            wrong.shard_forward(of=wrong.short, write=wrong.write_short),
            "The last elements of a parameter belong to nobody: its size is no multiple of N here. "
            "Round a shard's size up, and pad.",
            "piece_of pads; after the gather, whole[: p.numel()] drops the padding.",
        ),
        Misconception(
            "tied weight gathered twice",
            wrong.shard_forward(found=wrong.module_by_module),
            "A weight that two layers of the unit share is gathered twice: you go module by "
            "module. unit.parameters() gives each parameter once.",
        ),
        Misconception(
            "freed, and not gathered",
            wrong.shard_forward(gathers=False),
            "You free the parameters and never gather them: layers compute on empty storages.",
            "unit.register_forward_pre_hook(gather) runs before each forward.",
        ),
        Misconception(
            "does not wait",
            wrong.shard_forward(later=True),
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
            wrong.all_reduced,
            "The numbers are right, but an all_reduce of pieces in zeros sends twice the bytes of "
            "an all_gather: it adds up, where there is nothing to add.",
        ),
    ),
)
