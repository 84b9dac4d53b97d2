"""Lesson 06, 06-reduce: each rank gets the mean of its own shard of the gradients."""

import torch
import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.zero1 import ZeRO1
from grading.exercises import small_model, zero2_on_ranks
from grading.exercises.zero2_on_ranks import each_part


def reduce_to_owners(flat):
    shard = torch.zeros(flat.shard_size)
    for bucket in flat.buckets:
        whole = torch.zeros(bucket.size)
        for part in bucket.parts:
            whole[part.place] = part.of(part.parameter.grad) / dist.get_world_size()
        dist.reduce_scatter_single(shard[bucket.in_shard], whole)
    return shard


def _from_a_list_of_pieces(flat):
    """A different way to the same: a list of pieces for each bucket, and the shard put together."""
    mine = []
    for bucket in flat.buckets:
        gradients = torch.cat([part.of(part.parameter.grad) for part in bucket.parts])
        padding = gradients.new_zeros(bucket.size - len(gradients))
        pieces = torch.cat([gradients, padding]).chunk(dist.get_world_size())
        mine.append(torch.empty_like(pieces[0]))
        dist.reduce_scatter(mine[-1], list(pieces))
    return torch.cat(mine) / dist.get_world_size()


def _freed_once_copied(flat):
    shard = reduce_to_owners(flat)
    for parameter in flat.parameters:
        parameter.grad = None
    return shard


def _filled(flat, new=torch.zeros):
    for bucket in flat.buckets:
        whole = new(bucket.size)
        for part in bucket.parts:
            whole[part.place] = part.of(part.parameter.grad) / dist.get_world_size()
        yield bucket, whole


def _all_filled_first(flat):
    """A whole copy of the gradients, in buckets, before the first is sent."""
    shard = torch.zeros(flat.shard_size)
    for bucket, whole in list(_filled(flat)):
        _scatter(whole, shard[bucket.in_shard])
    return shard


def _not_from_zeros(flat):
    shard = torch.zeros(flat.shard_size)
    for bucket, whole in _filled(flat, torch.empty):
        _scatter(whole, shard[bucket.in_shard])
    return shard


def _by_bucket(reduce, divisor=dist.get_world_size):
    """`reduce(whole, piece)` for each bucket, whose gradients have been divided."""

    def answer(flat):
        shard = torch.zeros(flat.shard_size)
        each_part(flat, lambda _, whole, piece: reduce(whole / divisor(), piece), shard)
        return shard

    return answer


def _scatter(whole, piece):
    dist.reduce_scatter_single(piece, whole)


def _all_reduce(whole, piece):
    dist.all_reduce(whole)
    piece.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def _own(whole, piece):
    piece.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def _to_each_owner(whole, piece):
    for owner, part in enumerate(whole.chunk(dist.get_world_size())):
        dist.reduce(part, owner)
        if owner == dist.get_rank():
            piece.copy_(part)


def _async(whole, piece):
    dist.reduce_scatter_single(piece, whole, async_op=True)


def _without_the_last(flat):
    """Buckets without padding: the last one is cut into pieces that leave a rest."""
    shard = torch.zeros(flat.shard_size)
    for bucket in flat.buckets:
        gradients = torch.cat([part.of(part.parameter.grad) for part in bucket.parts])
        size = len(gradients) // dist.get_world_size()
        piece = shard[bucket.in_shard][:size]
        _scatter(gradients[: size * dist.get_world_size()] / dist.get_world_size(), piece)
    return shard


def _cut_short(flat):
    """The padding is cut off: the last rank's shard is shorter than the others'."""
    shard = reduce_to_owners(flat)
    total = sum(p.numel() for p in flat.parameters)
    padding = flat.shard_size * dist.get_world_size() - total
    return shard[:-padding] if padding and dist.get_rank() == dist.get_world_size() - 1 else shard


def _in_one(flat):
    """All gradients as one flat tensor, cut into N stretches."""
    gradients = torch.cat([p.grad.flatten() for p in flat.parameters]) / dist.get_world_size()
    padding = gradients.new_zeros(flat.shard_size * dist.get_world_size() - len(gradients))
    shard = torch.empty(flat.shard_size)
    dist.reduce_scatter_single(shard, torch.cat([gradients, padding]))
    return shard


def _returns_the_last_piece(flat):
    for bucket in flat.buckets:
        whole, piece = torch.zeros(bucket.size), torch.empty(bucket.size // dist.get_world_size())
        for part in bucket.parts:
            whole[part.place] = part.of(part.parameter.grad) / dist.get_world_size()
        _scatter(whole, piece)
    return piece


REDUCE = Exercise(
    id="06-reduce",
    title="Reduce each bucket to its owners",
    task="Return this rank's shard of the mean gradients, by one reduce_scatter for each bucket.",
    points={"all": 3},
    reference=reduce_to_owners,
    library=(ZeRO1._mean_gradients,),
    alternatives=(_from_a_list_of_pieces, _freed_once_copied),
    cases=(small_model.job([8, 12, 8, 1], 2, seed=1, steps=1, bucket=20),),
    fresh=lambda rng: [
        small_model.job(
            [8, rng.choice((11, 12)), 8, 2], 3, rng.randrange(10**6), steps=1, bucket=30
        )
    ],
    run=small_model.on_small_model(zero2_on_ranks.reduced),
    compare=zero2_on_ranks.near,
    nudge="For each bucket: zeros [bucket.size], the parts put in and divided by the number of "
    "ranks, then dist.reduce_scatter_single(shard[bucket.in_shard], whole).",
    misconceptions=(
        Misconception(
            "DDP under another name",
            _by_bucket(_all_reduce),
            "This is DDP under another name: all_reduce gives the whole bucket to every rank, "
            "which throws most of it away. It sends twice the bytes of what is needed.",
            "dist.reduce_scatter_single(piece, whole) gives this rank its piece alone.",
        ),
        Misconception(
            "SUM for AVG",
            _by_bucket(_scatter, lambda: 1),
            "This is the SUM over the ranks, N times too long. Divide by their number, once.",
            "dist.get_world_size(), before the reduce_scatter or after it.",
        ),
        Misconception(
            "divided twice",
            _by_bucket(_scatter, lambda: dist.get_world_size() ** 2),
            "You divide by the number of ranks twice.",
        ),
        Misconception(
            "no communication",
            _by_bucket(_own),
            "Each rank took its piece of its own gradients: nothing was communicated, so the other "
            "ranks' data is not in it.",
            "dist.reduce_scatter_single(piece, whole) adds up over ranks, and leaves a piece.",
        ),
        Misconception(
            "a reduce for each owner",
            _by_bucket(_to_each_owner),
            "The numbers are right, but you call reduce, N times for each bucket. reduce_scatter "
            "is all of these in one, and every link works at once.",
        ),
        Misconception(
            "does not wait",
            _by_bucket(_async),
            "You do not wait for every reduce_scatter that you start with async_op=True: who reads "
            "the shard finds the mean, or a part of it, by chance.",
            "Keep each work, and call its wait(); or leave async_op out.",
        ),
        Misconception(
            "padding lost: elements left over",
            _without_the_last,
            "The last elements of the last bucket reach nobody: without its padding it does not "
            "split into N equal pieces.",
            "A bucket has bucket.size elements, its parts may fill fewer: start from zeros.",
        ),
        Misconception(
            "padding lost: a shorter shard",
            _cut_short,
            "You cut the padding off: the last rank's shard is shorter than the others', and the "
            "all_gather of updated shards needs N equal ones. Return all flat.shard_size elements.",
        ),
        Misconception(
            "padding is what was in memory",
            _not_from_zeros,
            "The padding of the last bucket is whatever was in memory: torch.empty promises no "
            "values, and what it gives may be zeros today.",
            "A bucket has bucket.size elements, its parts may fill fewer: start from zeros.",
        ),
        Misconception(
            "all filled, then sent",
            _all_filled_first,
            "The shard is right, but all buckets are filled before the first is sent: a second "
            "copy of the gradients, P elements. Fill one, send it, and let it go.",
        ),
        Misconception(
            "all in one",
            _in_one,
            "You send all gradients in one: that takes a second copy of all of them, P elements, "
            "at once, and can start only when the last is ready. A bucket at a time is asked for.",
            "One reduce_scatter for each of flat.buckets.",
        ),
        Misconception(
            "the last piece alone",
            _returns_the_last_piece,
            "You return the last bucket's piece. A shard is this rank's pieces of all buckets, "
            "side by side.",
            "shard[bucket.in_shard] is where a bucket's piece belongs.",
        ),
    ),
)
