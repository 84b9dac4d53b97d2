"""Lesson 06, 06-accumulate: the sum over micro-batches, kept in shards."""

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.zero2 import ZeRO2
from grading.exercises import small_model, zero2_on_ranks


def accumulate(model, backward, micro_batches):
    total = 0
    for batch in micro_batches:
        loss = model(batch) / len(micro_batches)
        total += backward(loss)
    return total


def _divide_at_the_end(model, backward, micro_batches):
    first, *others = micro_batches
    total = backward(model(first))
    for batch in others:
        total.add_(backward(model(batch)))
    return total / len(micro_batches)


def _from_the_first(model, backward, micro_batches):
    total = None
    for batch in micro_batches:
        shard = backward(model(batch) / len(micro_batches))
        if total is None:
            total = shard
        else:
            total += shard
    return total


def _running_mean(model, backward, micro_batches):
    mean = torch.zeros(())
    for number, batch in enumerate(micro_batches, start=1):
        mean = mean + (backward(model(batch)) - mean) / number
    return mean


def _no_sync(model, backward, micro_batches):
    *early, last = micro_batches
    for batch in early:
        (model(batch) / len(micro_batches)).backward()
    return backward(model(last) / len(micro_batches))


def _accumulate(share=lambda n: n, after=lambda n: 1, keep=lambda total, shard: total + shard):
    """The reference with one thing wrong."""

    def answer(model, backward, micro_batches):
        n, total = len(micro_batches), 0
        for batch in micro_batches:
            total = keep(total, backward(model(batch) / share(n)))
        return total / after(n)

    return answer


def _last_only(model, backward, micro_batches):
    return backward(model(micro_batches[-1]))


def _in_a_list(model, backward, micro_batches):
    shards = [backward(model(batch)) for batch in micro_batches]
    return sum(shards) / len(shards)


def _in_a_whole_sum(model, backward, micro_batches):
    size, rank = dist.get_world_size(), dist.get_rank()
    sums = None  # [N, S]
    for batch in micro_batches:
        shard = backward(model(batch) / len(micro_batches))
        sums = torch.zeros(size, len(shard)) if sums is None else sums
        sums[rank] += shard
    return sums[rank]


def _one_backward(model, backward, micro_batches):
    return backward(sum(map(model, micro_batches)) / len(micro_batches))


def _one_forward(model, backward, micro_batches):
    return backward(model(torch.cat(micro_batches)))


def _first_twice(model, backward, micro_batches):
    total = None
    for batch in micro_batches:
        shard = backward(model(batch) / len(micro_batches))
        total = shard.clone() if total is None else total
        total += shard
    return total


def _all_reduced(model, backward, micro_batches):
    total = accumulate(model, backward, micro_batches) / dist.get_world_size()
    dist.all_reduce(total)
    return total


def _returns_nothing(model, backward, micro_batches):
    accumulate(model, backward, micro_batches)


_NO_SYNC = (
    "You kept DDP's no_sync: whole gradients add up in grad between micro-batches, and are reduced "
    "once. That sends less, but P elements stay alive on every rank: it is ZeRO-1. In ZeRO-2 each "
    "micro-batch is reduced."
)
_LAST = (
    "Only the last micro-batch is kept: each one overwrites the sum. Half of the data or more is "
    "never learned from, and no error says so."
)

ACCUMULATE = Exercise(
    id="06-accumulate",
    title="Keep the sum in shards",
    task="Run all micro-batches; reduce each, and return the sum of their shards.",
    points={"all": 4},
    reference=accumulate,
    library=(ZeRO2.__init__,),
    alternatives=(_divide_at_the_end, _running_mean, _from_the_first),
    cases=(small_model.job([3, 4, 2, 1], 3, seed=1, steps=5, bucket=12),),
    fresh=lambda rng: [
        small_model.job(
            [5, 6, 4, 2], 3, rng.randrange(10**6), steps=rng.choice((4, 6, 7)), bucket=30
        )
    ],
    run=small_model.on_small_model(zero2_on_ranks.accumulated),
    compare=zero2_on_ranks.near,
    nudge="For each micro-batch: the loss divided by their number, backward(loss), and its shard "
    "added to a sum.",
    misconceptions=(
        Misconception(
            "no_sync kept, as in DDP",
            _no_sync,
            _NO_SYNC,
            "Call backward(loss), which reduces and frees, for every micro-batch.",
        ),
        Misconception(
            "the last one overwrites",
            _accumulate(keep=lambda total, shard: shard),
            _LAST,
            "Add to what is there: +=, not =.",
        ),
        Misconception(
            "the last micro-batch only",
            _last_only,
            "You run the last micro-batch only: the others were loaded for nothing.",
        ),
        Misconception(
            "not divided",
            _accumulate(share=lambda n: 1),
            "This is the sum over micro-batches; the mean loss of the whole batch has their mean "
            "as its gradient.",
            "Divide each loss by len(micro_batches).",
        ),
        Misconception(
            "divided twice",
            _accumulate(after=lambda n: n),
            "You divide by the number of micro-batches twice: the losses, and their sum again.",
        ),
        Misconception(
            "divided by the ranks too",
            _accumulate(after=lambda n: dist.get_world_size()),
            "You divide by the number of ranks too. backward gives a mean over ranks already; "
            "divide by len(micro_batches).",
        ),
        Misconception(
            "divided by a number",
            _accumulate(share=lambda n: 5),
            "You divide by 5, as if that were always the number of micro-batches: it is "
            "len(micro_batches).",
        ),
        Misconception(
            "the first one twice",
            _first_twice,
            "The first micro-batch is in the sum twice: the sum starts with it, and then it is "
            "added.",
            "Start with zeros, or with 0.",
        ),
        Misconception(
            "shards in a list",
            _in_a_list,
            "The sum is right, but you keep every micro-batch's shard, or a copy of it, until the "
            "end: G shards in place of one, and with as many micro-batches as ranks that is a "
            "whole copy again.",
            "Add each shard to one sum, and let it go.",
        ),
        Misconception(
            "a sum of whole gradients",
            _in_a_whole_sum,
            "The shard is right, but you keep a sum with room for all N shards, [N, S]: a whole "
            "copy on every rank, of which the rank fills 1/N. One [S] is enough.",
        ),
        Misconception(
            "all_reduce of the sum",
            _all_reduced,
            "You all_reduce the sum. The ranks' shards are of different parameters, each the mean "
            "over all ranks already: there is nothing to add up.",
        ),
        Misconception(
            "one backward for all",
            _one_backward,
            "The gradient is right, but the activations of all micro-batches were alive at once. "
            "Run backward after each forward.",
        ),
        Misconception(
            "one forward for all",
            _one_forward,
            "You put the micro-batches together into one: the gradient is right, but all their "
            "activations are alive at once, which is what did not fit.",
        ),
        Misconception(
            "returns nothing",
            _returns_nothing,
            "accumulate must return this rank's sum; yours returned None.",
        ),
    ),
)
