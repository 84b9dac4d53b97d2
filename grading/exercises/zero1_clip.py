"""Lesson 05, 05-clip: the global norm of gradients of which each rank has a shard."""

import math

import torch
import torch.distributed as dist

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded.zero1 import ZeRO1
from grading.exercises import on_a_ring, zero1_runs


def clip_shard(gradient, max_norm):
    squares = gradient.square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm.item()


def _by_norms(gradient, max_norm):
    norms = torch.empty(dist.get_world_size())
    dist.all_gather_single(norms, gradient.norm().view(1))
    norm = torch.linalg.vector_norm(norms).item()
    if norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm


def _all(value):
    total = value.clone()
    dist.all_reduce(total)
    return total


def _largest(gradient):
    norm = gradient.norm()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    return norm


def _gathered(gradient):
    whole = gradient.new_empty(dist.get_world_size() * len(gradient))
    dist.all_gather_single(whole, gradient)
    return whole.norm()


def _largest_element(gradient, norm):
    largest = gradient.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def _clip(
    norm=lambda gradient: _all(gradient.square().sum()).sqrt(),
    compared=lambda gradient, norm: norm,
):
    """The reference with one thing wrong: the norm, or what is compared with max_norm."""

    def answer(gradient, max_norm):
        found = norm(gradient)
        if compared(gradient, found) > max_norm:
            gradient *= float(max_norm / (found + 1e-6))
        return float(found)

    return answer


def _each_element(gradient, max_norm):
    norm = _all(gradient.square().sum()).sqrt()
    gradient.clamp_(-max_norm, max_norm)
    return norm.item()


def _a_new_tensor(gradient, max_norm):
    return clip_shard(gradient.clone(), max_norm)


def _scaled_by_own_norm(gradient, max_norm):
    norm = _all(gradient.square().sum()).sqrt()
    gradient *= min(float(max_norm / (gradient.norm() + 1e-6)), 1.0)
    return norm.item()


def _case(shards: list[list[float]], *limits: float) -> Case:
    """The gradient, 40 zeros on every rank besides: it is larger than what the norm needs.

    limits: the max_norms. By default one that is longer than the shortest shard and shorter than
    the whole gradient, and two that are longer than that.
    """
    longer = [shard + [0.0] * 40 for shard in shards]
    norm = math.hypot(*sum(shards, []))
    limits = limits or (round((min(math.hypot(*s) for s in shards) + norm) / 2, 2), 100, 1000)
    held = "; ".join(f"rank {r} has {shard} and zeros" for r, shard in enumerate(shards))
    given = (
        f"{held}; the norm of all is {norm:.6g}; max_norm {' then '.join(f'{m:g}' for m in limits)}"
    )
    inputs = [[shard, {"max_norm": list(limits)}] for shard in longer]
    return Case(f"{len(shards)} ranks", (inputs,), given=given)


CLIP = Exercise(
    id="05-clip",
    title="Clip by the global norm",
    task="Clip this rank's shard by the norm of the whole gradient, and return that norm.",
    points={"all": 4},
    reference=clip_shard,
    library=(ZeRO1.__init__,),
    alternatives=(_by_norms,),
    # Rank 0's norm is below 3.5; every element is below 12.5; the square of the norm, 13, is not
    # below 100.
    cases=(_case([[3.0, 0.0, 0.0], [0.0, -4.0, 0.0], [4.0, 8.0, -8.0]], 3.5, 12.5, 100, 1000),),
    fresh=lambda rng: [_case(on_a_ring.numbers(rng, 4, 3))],
    run=zero1_runs.clipped,
    compare=close(1e-4, 1e-5),
    nudge="Add up this rank's squares, all_reduce that one number, take the root. The factor is "
    "max_norm / norm, and at most 1.",
    misconceptions=(
        Misconception(
            "local norm",
            _clip(norm=lambda gradient: gradient.norm()),
            "You clip by the norm of your own shard. Each rank then scales by another factor, and "
            "the update points in a direction that no gradient had.",
            "all_reduce the sum of squares, one number, before the root.",
        ),
        Misconception(
            "local norm, the global one returned",
            _scaled_by_own_norm,
            "The norm that you return is right, but you scale by that of your own shard: each rank "
            "by another factor.",
            "Every rank scales by max_norm / norm, with the same norm.",
        ),
        Misconception(
            "sum of norms",
            _clip(norm=lambda gradient: _all(gradient.norm())),
            "You added up the shards' norms. Squares add up, norms do not: 3 and 4 make 5.",
            "all_reduce the sum of squares, and take the root of the result.",
        ),
        Misconception(
            "mean of squares",
            _clip(
                norm=lambda g: (_all(g.square().sum()) / dist.get_world_size()).sqrt(),
            ),
            "You averaged over the ranks, and the norm is too small by the square root of N. The "
            "shards are different elements: their squares add up.",
        ),
        Misconception(
            "mean over elements",
            _clip(norm=lambda g: (_all(g.square().mean()) / dist.get_world_size()).sqrt()),
            "You take the mean of the squares, not their sum. It depends on how many elements "
            "there are, so even padding changes it.",
        ),
        Misconception(
            "largest norm",
            _clip(norm=_largest),
            "You took the largest shard's norm. The whole gradient is longer than its longest "
            "shard: squares add up over the ranks.",
        ),
        Misconception(
            "no root",
            _clip(norm=lambda gradient: _all(gradient.square().sum())),
            "That is the square of the norm: the root is missing.",
        ),
        Misconception(
            "always scaled",
            _clip(compared=lambda gradient, norm: math.inf),
            "You scale short gradients up to max_norm. Clipping only shortens: the factor is at "
            "most 1.",
        ),
        Misconception(
            "the local norm decides",
            _clip(compared=lambda gradient, norm: gradient.norm()),
            "The norm is right, but each rank decides by that of its own shard whether to clip: "
            "some scale and some do not, or none does where the whole gradient is too long.",
            "Compare max_norm with the norm that you return: it is the same on all ranks.",
        ),
        Misconception(
            "the square decides",
            _clip(compared=lambda gradient, norm: norm**2),
            "The norm is right, but you compare its square with max_norm: gradients that are short "
            "enough are scaled, up to max_norm, and below 1 long ones are not.",
            "Take the root before you compare.",
        ),
        Misconception(
            "the largest element decides",
            _clip(compared=_largest_element),
            "The norm is right, but you clip only where an element is larger than max_norm. Many "
            "small elements make a long gradient: the norm decides.",
            "Compare max_norm with the norm that you return.",
        ),
        Misconception(
            "gathers the gradient",
            _clip(norm=_gathered),
            "The numbers are right, but you bring the whole gradient to every rank, to get one "
            "number: P elements travel where one would do, and have to fit.",
            "all_reduce the sum of squares.",
        ),
        Misconception(
            "each element",
            _each_element,
            "You cut each element at max_norm. That turns the gradient; clipping by the norm "
            "shortens it, and keeps its direction.",
        ),
        Misconception(
            "a new tensor",
            _a_new_tensor,
            "The norm is right, but the gradient that you were given is as long as before. Scale "
            "it in place.",
            "gradient *= factor",
        ),
    ),
)
