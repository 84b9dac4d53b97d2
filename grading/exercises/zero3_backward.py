"""Lesson 07, 07-backward: a unit is gathered again, freed again, and its gradients scattered."""

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.unit import Unit
from course_lib.sharded.zero3 import ZeRO3
from grading.exercises import small_model, zero3_on_ranks
from grading.exercises.zero3_on_ranks import padded


def shard_backward(unit, gather, free):
    trained = [p for p in unit.parameters() if p.requires_grad]
    sums, arrived = {}, []

    def on_gradient(p):
        whole = padded(p.grad) / dist.get_world_size()  # [N·s]
        shard = whole.new_empty(len(whole) // dist.get_world_size())  # [s]
        dist.reduce_scatter_single(shard, whole)
        sums[p] = sums.get(p, 0) + shard
        p.grad = None
        arrived.append(p)
        if len(arrived) == len(trained):
            free()
            arrived.clear()

    unit.register_full_backward_pre_hook(lambda *_: gather())
    for p in trained:
        p.register_post_accumulate_grad_hook(on_gradient)
    return sums


def _as_one_collective(unit, gather, free):
    """A different way to the same: hooks on outputs, and one reduce_scatter for the unit."""
    trained = [p for p in unit.parameters() if p.requires_grad]
    n = dist.get_world_size()
    sums = {p: torch.zeros(-(-p.numel() // n)) for p in trained}

    def on_gradient(_):
        if all(p.grad is not None for p in trained):
            free()
            rows = torch.cat([padded(p.grad).view(n, -1) for p in trained], dim=1)  # [N, S]
            shard = torch.empty(rows.shape[1])
            dist.reduce_scatter(shard, list(rows))
            pieces = (shard / n).split([len(total) for total in sums.values()])
            for p, piece in zip(trained, pieces, strict=True):
                sums[p] += piece
                p.grad = None

    unit.register_forward_hook(lambda _, args, out: out.register_hook(lambda _: gather()) and None)
    for p in trained:
        p.register_post_accumulate_grad_hook(on_gradient)
    return sums


class _Counting:
    """Another: waits for each gradient by its set, and starts collectives before it waits."""

    def __init__(self, unit, gather, free):
        self.trained = {p for p in unit.parameters() if p.requires_grad}
        self.gather, self.free, self.sums, self.works = gather, free, {}, []
        self.missing = set()
        unit.register_full_backward_pre_hook(self.begin)
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def begin(self, *_):
        self.gather()
        self.missing = set(self.trained)

    def on_gradient(self, p):
        rows = (padded(p.grad) / dist.get_world_size()).view(dist.get_world_size(), -1)
        p.grad, piece = None, torch.empty(rows.shape[1])
        work = dist.reduce_scatter_single(piece, rows.view(-1), async_op=True)
        self.works.append((p, piece, work))
        self.missing.discard(p)
        if not self.missing:
            self.free()
            for parameter, got, started in self.works:
                started.wait()
                self.sums[parameter] = got + self.sums.get(parameter, torch.zeros(()))
            self.works.clear()


def _counting(unit, gather, free):
    return _Counting(unit, gather, free).sums


def _scatter(shard, whole):
    dist.reduce_scatter_single(shard, whole)


def _all_reduce(shard, whole):
    dist.all_reduce(whole)
    _own(shard, whole)


def _own(shard, whole):
    shard.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def _add(sums, p, shard):
    sums[p] = sums.get(p, 0) + shard


def _overwrite(sums, p, shard):
    sums[p] = shard


def _shard_backward(
    gathers=lambda unit, gather: unit.register_full_backward_pre_hook(lambda *_: gather()),
    last=lambda count, trained, unit: count == len(trained),
    frees=True,
    frees_gradient=True,
    divisor=dist.get_world_size,
    collective=_scatter,
    keep=_add,
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


def _freed_by_the_module_hook(unit, gather, free):
    sums = _shard_backward(frees=False)(unit, gather, free)
    unit.register_full_backward_hook(lambda *_: free())
    return sums


def _gathered_at_each_gradient(unit, gather, free):
    """The module's hook is forgotten; a gradient's comes too late for what it was made of."""
    sums = {}
    for p in unit.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _: gather())
    sums = _shard_backward(gathers=lambda *_: None)(unit, gather, free)
    return sums


def _at_each_gradient(unit, gather, free):
    """Gathered before a gradient is reduced, freed after: backward itself had nothing."""
    sums = {}

    def on_gradient(p):
        gather()
        whole = padded(p.grad) / dist.get_world_size()
        shard = whole.new_empty(len(whole) // dist.get_world_size())
        dist.reduce_scatter_single(shard, whole)
        _add(sums, p, shard)
        p.grad = None
        free()

    for p in unit.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(on_gradient)
    return sums


def _async(shard, whole):
    dist.reduce_scatter_single(shard, whole, async_op=True)


def _returns_nothing(unit, gather, free):
    shard_backward(unit, gather, free)


def _dropped(tensor):
    """Without the padding, and without the elements that then are left over."""
    n = dist.get_world_size()
    short = tensor.numel() // n * n
    return tensor.detach().flatten()[:short].clone()


_EARLY = (
    "You free the unit before its backward is over: what is still to come reads an empty parameter."
)

BACKWARD = Exercise(
    id="07-backward",
    title="Gather again for backward",
    task="Register hooks that gather before the unit's backward, scatter its gradients, and free "
    "after it.",
    points={"all": 5},
    reference=shard_backward,
    library=(Unit.__init__, ZeRO3.__init__),
    alternatives=(_as_one_collective, _counting),
    cases=(zero3_on_ranks.job(15, 3, 2, seed=1),),
    fresh=lambda rng: [
        zero3_on_ranks.job(rng.choice((16, 17)), 3, 3, rng.randrange(10**6), tied=True, frozen=True)
    ],
    run=small_model.on_small_model(zero3_on_ranks.reduced),
    compare=zero3_on_ranks.near,
    nudge="register_full_backward_pre_hook calls gather(). A post-accumulate hook of each trained "
    "p: padded(p.grad) / N, reduce_scatter_single, add to sums[p], p.grad = None; and free() when "
    "as many have come as there are trained parameters.",
    misconceptions=(
        Misconception(
            "re-gather forgotten",
            _shard_backward(gathers=lambda *_: None),
            "You do not gather before backward: it reads parameters that were freed after forward. "
            "Gradients with respect to a layer's inputs need its weights.",
            "unit.register_full_backward_pre_hook(lambda *_: gather())",
        ),
        Misconception(
            "gathered when the first gradient comes",
            _gathered_at_each_gradient,
            "You gather when a gradient is there: too late, as it was computed from weights that "
            "were empty. Gather before the unit's backward begins.",
            "unit.register_full_backward_pre_hook(lambda *_: gather())",
        ),
        Misconception(
            "gathered and freed at each gradient",
            _at_each_gradient,
            "You gather at each gradient: too late, as it was computed from weights that were "
            "empty, and once for each parameter. Gather once, before the unit's backward.",
            "unit.register_full_backward_pre_hook(lambda *_: gather())",
        ),
        Misconception(
            "gathered after forward",
            _shard_backward(
                gathers=lambda unit, gather: unit.register_forward_hook(lambda *_: gather())
            ),
            "You gather right after forward, so every unit is whole until its backward: all of the "
            "model at once, which is what did not fit.",
            "Gather when backward comes to the unit: register_full_backward_pre_hook.",
        ),
        Misconception(
            "never freed in backward",
            _shard_backward(frees=False),
            "You gather for backward, and never free: when it ends, all units are whole.",
            "Count the unit's gradients, and call free() at the last one.",
        ),
        Misconception(
            "freed by the module's backward hook",
            _freed_by_the_module_hook,
            _EARLY + " A module's full backward hook fires at once where its inputs need no "
            "gradient, as in the first unit.",
            "Call free() when the unit's last gradient has come.",
        ),
        Misconception(
            "freed at the first gradient",
            _shard_backward(last=lambda count, trained, unit: count == 1),
            _EARLY,
            "Call free() when as many gradients have come as the unit has trained parameters.",
        ),
        Misconception(
            "waits for a frozen one",
            _shard_backward(
                last=lambda count, trained, unit: count == len(list(unit.parameters()))
            ),
            "With a frozen parameter in it, your unit is never freed: you wait for a gradient that "
            "does not come. Count trained parameters, p.requires_grad, alone.",
        ),
        Misconception(
            "DDP under another name",
            _shard_backward(collective=_all_reduce),
            "You all_reduce whole gradients, and cut your shard out of them: DDP's messages, twice "
            "the bytes. A reduce_scatter gives each rank its shard of the sum.",
        ),
        Misconception(
            "no communication",
            _shard_backward(collective=_own),
            "Each rank takes its piece of its own gradients: the other ranks' data is not in it.",
            "dist.reduce_scatter_single(shard, whole)",
        ),
        Misconception(
            "SUM for AVG",
            _shard_backward(divisor=lambda: 1),
            "This is the SUM over the ranks, N times too long: divide by their number, once.",
        ),
        Misconception(
            "the last micro-batch alone",
            _shard_backward(keep=_overwrite),
            "Only the last micro-batch is kept: each one overwrites the sum. Add to what is there.",
        ),
        Misconception(
            "whole gradients stay",
            _shard_backward(frees_gradient=False),
            "Whole gradients stay in grad, on every rank; and since backward adds to them, the "
            "next micro-batch reduces this one again.",
            "p.grad = None, once its shard has been reduced.",
        ),
        Misconception(
            "does not wait",
            _shard_backward(collective=_async),
            "You add a shard of a reduce_scatter that you started with async_op=True and did not "
            "wait for: what has come by then is chance.",
            "Leave async_op out here; the library waits before it adds.",
        ),
        Misconception(
            "returns nothing",
            _returns_nothing,
            "shard_backward must return {parameter: [s]}, which backward fills; yours returned "
            "None.",
        ),
        Misconception(
            "padding lost",
            _shard_backward(pad=_dropped),
            "The last elements of a gradient reach nobody: its size is no multiple of N here. Pad "
            "it before you reduce-scatter.",
            "padded(p.grad) has N·s elements.",
        ),
    ),
)
