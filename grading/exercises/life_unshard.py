"""Lesson 08, 08-unshard: shards of unequal length come together to a whole parameter."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded.fsdp_unit import FSDPUnit
from grading.exercises import life_collectives, sharded_run, small_model


def unshard(shard, dim):
    ranks = dist.get_world_size()
    each = -(-dim // ranks)
    padded = shard.new_zeros(each, *shard.shape[1:])
    padded[: len(shard)] = shard
    whole = padded.new_empty(ranks * each, *shard.shape[1:])
    dist.all_gather_single(whole, padded)
    return whole[:dim]


def _from_pieces(shard, dim):
    """A different way to the same: a list of flat pieces, padding cut at the end."""
    each = -(-dim // dist.get_world_size())
    row = shard.shape[1:].numel()
    padded = F.pad(shard.flatten(), (0, each * row - shard.numel()), value=7.0)
    pieces = [torch.zeros_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, padded)
    return torch.cat(pieces)[: dim * row].reshape(dim, *shard.shape[1:]).clone()


def _with(pad=None, read=lambda whole, dim: whole[:dim], gather=dist.all_gather_single):
    """The reference with one thing wrong."""

    def answer(shard, dim):
        each = -(-dim // dist.get_world_size())
        padded = shard.new_zeros(each, *shard.shape[1:])
        if pad:
            pad(padded, shard)
        else:
            padded[: len(shard)] = shard
        whole = padded.new_zeros(dist.get_world_size() * each, *shard.shape[1:])
        gather(whole, padded)
        return read(whole, dim)

    return answer


def _at_the_end(padded, shard):
    padded[len(padded) - len(shard) :] = shard


def _rows_dropped(whole, dim):
    """Takes as many rows of each rank as an even cut would have."""
    n = dist.get_world_size()
    pieces = whole.chunk(n)
    counts = [dim // n + (rank < dim % n) for rank in range(n)]
    return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])


def _all_reduce(whole, padded):
    whole[dist.get_rank() * len(padded) :][: len(padded)] = padded
    dist.all_reduce(whole)


def _own(whole, padded):
    whole[dist.get_rank() * len(padded) :][: len(padded)] = padded


def _unpadded(shard, dim):
    whole = shard.new_empty(dim, *shard.shape[1:])
    dist.all_gather_single(whole, shard)
    return whole


def _job(dim: int, row: list[int], n_ranks: int, seed: int) -> Case:
    given = f"of a parameter of {dim} rows, each [{', '.join(map(str, row))}], each rank its own"
    about = dict(dim=dim, row=row, ranks=n_ranks, seed=seed)
    return Case(f"{dim} rows on {n_ranks} ranks", (about,), given=given)


UNSHARD = Exercise(
    id="08-unshard",
    title="Whole again",
    task="Return the whole parameter, made of all ranks' rows.",
    points={"all": 3},
    reference=unshard,
    library=(FSDPUnit.unshard,),
    alternatives=(_from_pieces,),
    cases=(_job(5, [3, 2], 4, seed=1),),
    run=small_model.on_small_model(life_collectives.unsharded),
    compare=sharded_run.worded(small_model.near),
    nudge="Every rank sends ⌈dim/N⌉ rows: put yours at the beginning of zeros of that shape. "
    "all_gather_single into N times as many rows, of which the first dim are the parameter.",
    misconceptions=(
        Misconception(
            "shards gathered as they are",
            _unpadded,
            "You gather shards as they are, and these are not of one length: a collective moves "
            "as much from each rank. Pad them to ⌈dim/N⌉ rows.",
            "padded = shard.new_zeros(each, *shard.shape[1:]); padded[: len(shard)] = shard",
        ),
        Misconception(
            "padding stays",
            _with(read=lambda whole, dim: whole),
            "You return the padding, too. It stands behind the last row: cut it off.",
            "whole[:dim]",
        ),
        Misconception(
            "padding first",
            _with(pad=_at_the_end),
            "You put the padding before a rank's rows. So it stands in the middle of what is "
            "gathered, and the last rows are cut off. Rows first, then zeros.",
        ),
        Misconception(
            "cut as even as can be",
            _with(read=_rows_dropped),
            "You take rows as if they had been dealt out evenly. The first ranks have ⌈dim/N⌉ "
            "each, and what is padding stands at the end.",
        ),
        Misconception(
            "all_reduce in zeros",
            _with(gather=_all_reduce),
            "The rows are right, but an all_reduce of pieces in zeros sends twice the bytes of an "
            "all_gather: it adds up, where there is nothing to add.",
        ),
        Misconception(
            "no communication",
            _with(gather=_own),
            "The other ranks' rows are missing: they come by an all_gather.",
        ),
        Misconception(
            "flat",
            _with(read=lambda whole, dim: whole[:dim].flatten()),
            "The elements are right, and flat. The parameter's shape is (dim, *shard.shape[1:]).",
        ),
    ),
)
