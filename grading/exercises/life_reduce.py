"""Lesson 08, 08-reduce: gradients computed in bf16 are reduced in fp32."""

import torch
import torch.distributed as dist

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded.fsdp_unit import FSDPUnit
from grading.exercises import life_collectives, sharded_run, small_model


def mean_of_rows(gradient):
    whole = gradient.float() / dist.get_world_size()  # [N·S]
    mean = whole.new_empty(len(whole) // dist.get_world_size())  # [S]
    dist.reduce_scatter_single(mean, whole)
    return mean


def _from_pieces(gradient):
    """A different way to the same: a list of pieces, and the sum divided after it."""
    pieces = list(gradient.to(torch.float32).chunk(dist.get_world_size()))
    total = torch.zeros_like(pieces[0])
    dist.reduce_scatter(total, pieces)
    return total.div_(dist.get_world_size())


def _with(
    send=torch.Tensor.float,
    before=dist.get_world_size,
    after=lambda: 1,
    give=torch.Tensor.float,
    collective=lambda mean, whole: dist.reduce_scatter_single(mean, whole),
):
    """The reference with one thing wrong: `send` and `give` cast what is sent, and what came."""

    def answer(gradient):
        whole = send(gradient) / before()
        mean = whole.new_empty(len(whole) // dist.get_world_size())
        collective(mean, whole)
        return give(mean / after())

    return answer


def _same(tensor):
    return tensor


def _divided_first(gradient):
    return (gradient / dist.get_world_size()).float() * dist.get_world_size()


def _all_reduce(mean, whole):
    dist.all_reduce(whole)
    _own(mean, whole)


def _own(mean, whole):
    mean.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


REDUCE = Exercise(
    id="08-reduce",
    title="Compute in bf16, reduce in fp32",
    task="Return this rank's rows of the mean over ranks, summed in fp32.",
    points={"all": 3},
    reference=mean_of_rows,
    library=(FSDPUnit.reduce,),
    alternatives=(_from_pieces,),
    cases=(
        Case(
            "3 ranks",
            (dict(ranks=3, seed=1, size=12),),
            given="on each rank a gradient of its own of 36 elements, in bf16",
        ),
    ),
    run=small_model.on_small_model(life_collectives.reduced),
    compare=sharded_run.worded(close(1e-5, 1e-7)),
    nudge="gradient.float() first: then divide by N, reduce_scatter_single into a new fp32 tensor "
    "of 1/N of the elements, and return that.",
    misconceptions=(
        Misconception(
            "reduced in bf16, cast after",
            _with(send=_same),
            "You cast when all is over: the sum was made in bf16, and the digits that it lost do "
            "not come back. Cast before you reduce.",
        ),
        Misconception(
            "bf16 all the way",
            _with(send=_same, give=_same),
            "You reduce in bf16, which has 8 bits of mantissa: each addition rounds. Cast to fp32 "
            "before you reduce.",
        ),
        Misconception(
            "divided in bf16",
            _with(send=_divided_first),
            "You divide in bf16 and cast then: a third is rounded to 8 bits on every rank. Cast "
            "first, divide then.",
        ),
        Misconception(
            "given back in bf16",
            _with(give=torch.Tensor.bfloat16),
            "The sum is made in fp32, and rounded to bf16 at the end. The shard and its optimizer "
            "are in fp32: return the mean as it is.",
        ),
        Misconception(
            "averaged twice",
            _with(after=dist.get_world_size),
            "You divide by the ranks twice: before the sum and after it. Once is the mean.",
        ),
        Misconception(
            "not averaged",
            _with(before=lambda: 1),
            "This is the SUM over ranks: divide by their number, before or after, once.",
        ),
        Misconception(
            "DDP under another name",
            _with(collective=_all_reduce),
            "You all_reduce all of it, and take your rows: DDP's messages, twice the bytes. A "
            "reduce_scatter gives each rank its rows of the sum.",
        ),
        Misconception(
            "no communication",
            _with(collective=_own),
            "These are rows of this rank's own gradient: the other ranks' data is not in it.",
        ),
    ),
)
