"""Lesson 08, 08-cycle: the life cycle of a unit, on a skeleton that runs from the beginning."""

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.fsdp import FSDP
from course_lib.sharded.fsdp_unit import FSDPUnit
from grading.exercises import life_on_ranks, small_model
from grading.exercises.life_on_ranks import SHARDED, WHOLE


def life_cycle(unit):
    ranks = dist.get_world_size()

    def unshard():
        if unit.state == "sharded":
            whole = unit.shard.new_empty(ranks * len(unit.shard))  # [N·S]
            dist.all_gather_single(whole, unit.shard)
            unit.show(whole)

    def reshard():
        if not unit.root:
            unit.free()

    def reduce():
        unit.free()
        mean = torch.empty_like(unit.shard)  # [S]
        dist.reduce_scatter_single(mean, unit.gradient() / ranks)
        unit.add(mean)

    return dict(
        pre_forward=unshard, post_forward=reshard, pre_backward=unshard, post_backward=reduce
    )


class _AsAnObject:
    """A different way to the same: lists of pieces, a sum divided after it, freed at last."""

    def __init__(self, unit):
        self.unit, self.ranks = unit, dist.get_world_size()

    def forward(self):
        pieces = [torch.empty_like(self.unit.shard) for _ in range(self.ranks)]
        dist.all_gather(pieces, self.unit.shard)
        self.unit.show(torch.stack(pieces))

    def after_forward(self):
        return None if self.unit.root else self.unit.free()

    def backward(self):
        if not self.unit.root:
            self.forward()

    def after_backward(self):
        total = self.unit.shard.new_empty(len(self.unit.shard))
        dist.reduce_scatter(total, list(self.unit.gradient().chunk(self.ranks)))
        self.unit.add(total / self.ranks)
        self.unit.free()

    def hooks(self):
        return {
            "pre_forward": self.forward,
            "post_forward": self.after_forward,
            "pre_backward": self.backward,
            "post_backward": self.after_backward,
        }


def _as_an_object(unit):
    return _AsAnObject(unit).hooks()


def _overlapped(unit):
    """Another: the reduction is started, the parameters are freed, then it is waited for."""
    hooks = life_cycle(unit)

    def reduce():
        whole = unit.gradient().div_(dist.get_world_size())
        mean = whole.new_empty(len(unit.shard))
        work = dist.reduce_scatter_single(mean, whole, async_op=True)
        unit.free()
        work.wait()
        unit.add(mean)

    return hooks | {"post_backward": reduce}


def _nothing():
    pass


def _gather(unit):
    whole = unit.shard.new_empty(dist.get_world_size() * len(unit.shard))
    dist.all_gather_single(whole, unit.shard)
    unit.show(whole)


def _reduce(unit, before=dist.get_world_size, after=lambda: 1, frees=True):
    mean = torch.empty_like(unit.shard)
    dist.reduce_scatter_single(mean, unit.gradient() / before())
    unit.add(mean / after())
    if frees:
        unit.free()


def _with(**wrong):
    """The reference with some hooks wrong, each a function of the unit."""

    def answer(unit):
        hooks = {name: lambda f=f: f(unit) for name, f in wrong.items()}
        return life_cycle(unit) | hooks

    return answer


def _all_reduce(unit):
    whole = unit.gradient()
    dist.all_reduce(whole)
    unit.add(whole.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size())


def _own(unit):
    unit.add(unit.gradient().chunk(dist.get_world_size())[dist.get_rank()].clone())


def _then_free(reduce):
    def both(unit):
        reduce(unit)
        unit.free()

    return both


def _early(unit):
    if unit.state == SHARDED:
        _gather(unit)
    _reduce(unit, frees=False)


def _kept_copies(unit):
    """The parameters are freed; what was gathered stays, to be shown again."""
    kept = {}
    hooks = life_cycle(unit)

    def forward():
        _gather(unit)
        kept["whole"] = torch.cat([p.detach().flatten() for p in unit.parameters])

    def backward():
        if unit.state != WHOLE:
            _gather(unit)

    return hooks | {"pre_forward": forward, "pre_backward": backward}


def _without_the_root(unit):
    return dict.fromkeys(life_on_ranks.HOOKS, _nothing) if unit.root else life_cycle(unit)


_GONE = "pre_backward: where the unit is sharded, gather it as in pre_forward."

CYCLE = Exercise(
    id="08-cycle",
    title="The life cycle of a unit",
    task="Return the four functions that gather, free and reduce a unit at the right moments.",
    points={"all": 5},
    reference=life_cycle,
    library=(FSDP.__init__, FSDPUnit.__init__),
    alternatives=(_as_an_object, _overlapped),
    cases=(),
    fresh=lambda rng: [life_on_ranks.job(rng.choice((16, 17)), 3, rng.randrange(10**6))],
    run=small_model.on_small_model(life_on_ranks.cycled),
    compare=life_on_ranks.near,
    nudge="pre_forward and pre_backward: if the unit is sharded, all_gather unit.shard and show. "
    "post_forward: free, unless it is the root. post_backward: reduce_scatter of unit.gradient() "
    "/ N, add, free.",
    misconceptions=(
        Misconception(
            "DDP under another name",
            _with(
                pre_forward=_gather,
                post_forward=lambda _: None,
                pre_backward=lambda _: None,
                post_backward=_all_reduce,
            ),
            "This is DDP under another name: every rank has whole parameters all the time, and "
            "gradients are all-reduced. Free what is not in use, and reduce_scatter.",
        ),
        Misconception(
            "never resharded",
            _with(
                pre_forward=_gather,
                post_forward=lambda _: None,
                post_backward=lambda unit: _reduce(unit, frees=False),
            ),
            "You gather, and never free: after forward every unit is whole, and stays so.",
            "unit.free() in post_forward (but for the root), and in post_backward.",
        ),
        Misconception(
            "gathered once and kept",
            _with(
                post_forward=lambda _: None,
                post_backward=lambda unit: _reduce(unit, frees=False),
            ),
            "You gather a unit when it is sharded, and never free it: the second step gathers "
            "nothing, and computes with the parameters of the first.",
            "After backward free every unit, the root too: the update makes what is whole old.",
        ),
        Misconception(
            "not freed after backward",
            _with(post_backward=lambda unit: _reduce(unit, frees=False)),
            "You free after forward, and not after backward: when it ends, all units are whole, "
            "and the next step computes with the parameters of this one.",
            "unit.free() in post_backward, of every unit, the root too.",
        ),
        Misconception(
            "missing backward re-gather",
            _with(pre_backward=lambda _: None),
            "You do not gather again for backward: it reads parameters that were freed after "
            "forward.",
            _GONE,
        ),
        Misconception(
            "reduced before the gradient is complete",
            _with(pre_backward=_early, post_backward=lambda unit: unit.free()),
            "You reduce before backward has been through the unit: its gradient is not there yet, "
            "and you send zeros, or what was left by the micro-batch before.",
            "post_backward is the moment at which the last of its gradients has come.",
        ),
        Misconception(
            "averaged twice",
            _with(post_backward=lambda unit: _reduce(unit, after=dist.get_world_size)),
            "You divide by the ranks twice: before the sum and after it. Once is the mean.",
        ),
        Misconception(
            "not averaged",
            _with(post_backward=lambda unit: _reduce(unit, before=lambda: 1)),
            "This is the SUM over ranks: divide by their number, before or after, once.",
        ),
        Misconception(
            "root unit forgotten",
            _without_the_root,
            "The root unit does nothing: its layers compute on empty parameters. It is gathered "
            "and reduced as any other; only after forward it stays.",
        ),
        Misconception(
            "root freed after forward",
            _with(post_forward=lambda unit: unit.free()),
            "You free the root after forward, too. Backward begins with it at once, so this costs "
            "an all_gather, and saves nothing.",
            "if not unit.root: unit.free()",
        ),
        Misconception(
            "the root gathered again",
            _with(pre_backward=_gather),
            "You gather the root twice: it is still whole when backward begins. Gather a unit "
            "that is sharded, and no other.",
            'if unit.state == "sharded": …',
        ),
        Misconception(
            "all_reduce for reduce_scatter",
            _with(post_backward=_then_free(_all_reduce)),
            "Parameters come and go as they should. But an all_reduce brings every rank the whole "
            "gradient, twice the bytes, where a reduce_scatter brings it its rows.",
        ),
        Misconception(
            "no communication of gradients",
            _with(post_backward=_then_free(_own)),
            "Each rank takes its rows of its own gradient: the other ranks' data is not in it.",
            "dist.reduce_scatter_single(mean, unit.gradient() / N)",
        ),
        Misconception(
            "buffers that stay",
            _kept_copies,
            "The parameters are freed, and a copy of what was gathered is not: the memory is that "
            "of whole parameters. Make the buffer where you gather, and let it go there.",
        ),
    ),
)
