"""Lesson 07, 07-backward: a unit is gathered again, freed again, and its gradients scattered."""

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.unit import Unit
from course_lib.sharded.zero3 import ZeRO3
from grading.exercises import small_model, zero3_on_ranks
from grading.exercises import zero3_backward_wrong as wrong
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


def _in_tensor_hooks(unit, gather, free):
    """Another: reduces the gradient that a tensor's hook is given, and counts when it is there."""
    trained = [p for p in unit.parameters() if p.requires_grad]
    sums, to_come = {}, set(trained)

    def reduce(p, gradient):
        pieces = [piece.contiguous() for piece in padded(gradient).chunk(dist.get_world_size())]
        shard = torch.empty_like(pieces[0])
        dist.reduce_scatter(shard, pieces)
        sums[p] = sums.get(p, 0) + shard / dist.get_world_size()

    def on_gradient(p):
        p.grad = None
        to_come.discard(p)
        if not to_come:
            free()
            to_come.update(trained)

    unit.register_full_backward_pre_hook(lambda *_: gather())
    for p in trained:
        p.register_hook(lambda gradient, p=p: reduce(p, gradient))
        p.register_post_accumulate_grad_hook(on_gradient)
    return sums


def _returns_nothing(unit, gather, free):
    shard_backward(unit, gather, free)


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
    alternatives=(_as_one_collective, _counting, _in_tensor_hooks),
    cases=(zero3_on_ranks.job(15, 4, 2, seed=1),),
    fresh=lambda rng: [
        zero3_on_ranks.job(rng.choice((16, 17)), 4, 3, rng.randrange(10**6), tied=True, frozen=True)
    ],
    run=small_model.on_small_model(zero3_on_ranks.reduced),
    compare=zero3_on_ranks.near,
    nudge="register_full_backward_pre_hook calls gather(). A post-accumulate hook of each trained "
    "p: padded(p.grad) / N, reduce_scatter_single, add to sums[p], p.grad = None; and free() when "
    "as many have come as there are trained parameters.",
    misconceptions=(
        Misconception(
            "re-gather forgotten",
            wrong.shard_backward(gathers=lambda *_: None),
            "You do not gather before backward: it reads parameters that were freed after forward. "
            "Gradients with respect to a layer's inputs need its weights.",
            "unit.register_full_backward_pre_hook(lambda *_: gather())",
        ),
        Misconception(
            "gathered when the first gradient comes",
            wrong.gathered_at_each_gradient,
            "You gather when a gradient is there: too late, as it was computed from weights that "
            "were empty. Gather before the unit's backward begins.",
            "unit.register_full_backward_pre_hook(lambda *_: gather())",
        ),
        Misconception(
            "gathered after forward",
            wrong.shard_backward(
                gathers=lambda unit, gather: unit.register_forward_hook(lambda *_: gather())
            ),
            "You gather right after forward, so every unit is whole until its backward: all of the "
            "model at once, which is what did not fit.",
            "Gather when backward comes to the unit: register_full_backward_pre_hook.",
        ),
        Misconception(
            "never freed in backward",
            wrong.shard_backward(frees=False),
            "You gather for backward, and never free: when it ends, all units are whole.",
            "Count the unit's gradients, and call free() at the last one.",
        ),
        Misconception(
            "freed by the module's backward hook",
            wrong.freed_by_the_module_hook,
            _EARLY + " A module's full backward hook fires at once where its inputs need no "
            "gradient, as in the first unit.",
            "Call free() when the unit's last gradient has come.",
        ),
        Misconception(
            "freed at the first gradient",
            wrong.shard_backward(last=lambda count, trained, unit: count == 1),
            _EARLY,
            "Call free() when as many gradients have come as the unit has trained parameters.",
        ),
        Misconception(
            "waits for a frozen one",
            wrong.shard_backward(
                last=lambda count, trained, unit: count == len(list(unit.parameters()))
            ),
            "With a frozen parameter in it, your unit is never freed: you wait for a gradient that "
            "does not come. Count trained parameters, p.requires_grad, alone.",
        ),
        Misconception(
            "DDP under another name",
            wrong.shard_backward(collective=wrong.all_reduce),
            "You all_reduce whole gradients, and cut your shard out of them: DDP's messages, twice "
            "the bytes. A reduce_scatter gives each rank its shard of the sum.",
        ),
        Misconception(
            "no communication",
            wrong.shard_backward(collective=wrong.own),
            "Each rank takes its piece of its own gradients: the other ranks' data is not in it.",
            "dist.reduce_scatter_single(shard, whole)",
        ),
        Misconception(
            "SUM for AVG",
            wrong.shard_backward(divisor=lambda: 1),
            "This is the SUM over the ranks, N times too long: divide by their number, once.",
        ),
        Misconception(
            "the last micro-batch alone",
            wrong.shard_backward(keep=wrong.overwrite),
            "Only the last micro-batch is kept: each one overwrites the sum. Add to what is there.",
        ),
        Misconception(
            "whole gradients stay",
            wrong.shard_backward(frees_gradient=False),
            "Whole gradients stay in grad, on every rank; and since backward adds to them, the "
            "next micro-batch reduces this one again.",
            "p.grad = None, once its shard has been reduced.",
        ),
        Misconception(
            "whole sums",
            wrong.whole_sums,
            "You sum whole gradients over micro-batches, which stay on every rank; the shards are "
            "right, the memory is ZeRO-1's. Reduce each micro-batch's, and sum shards.",
        ),
        Misconception(
            "sums of new memory",
            wrong.without_zeros,
            "Your sums begin with what happens to be in new memory: torch.empty has no zeros. "
            "Begin with 0, or with the first shard.",
        ),
        Misconception(
            "does not wait",
            wrong.shard_backward(collective=wrong.not_waited),
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
            wrong.shard_backward(pad=wrong.dropped),
            "The last elements of a gradient reach nobody: its size is no multiple of N here. Pad "
            "it before you reduce-scatter.",
            "padded(p.grad) has N·s elements.",
        ),
    ),
)
