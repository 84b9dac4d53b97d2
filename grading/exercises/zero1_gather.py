"""Lesson 05, 05-gather: the parameters, put together from the ranks' shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.zero1 import ZeRO1
from grading.exercises import sharded_run, small_model, zero1_runs
from grading.exercises.zero1_runs import all_padded, mine


def put_together(model, shard):
    whole = shard.new_empty(dist.get_world_size() * len(shard))  # [N·S]
    dist.all_gather_single(whole, shard)
    vector_to_parameters(whole, model.parameters())


def _in_a_list(model, shard):
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    work = dist.all_gather(shards, shard, async_op=True)
    work.wait()
    whole = torch.cat(shards)
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            stop = start + parameter.numel()
            parameter.copy_(whole[start:stop].view_as(parameter))
            start = stop


def _gather(collect=None, arrange=lambda whole: whole, write=vector_to_parameters):
    """The reference with one thing wrong."""

    def by_all_gather(whole, shard):
        dist.all_gather_single(whole, shard)

    def answer(model, shard):
        whole = all_padded(model.parameters())
        (collect or by_all_gather)(whole, shard)
        write(arrange(whole), model.parameters())

    return answer


def _alone(whole, shard):
    mine(whole).copy_(shard)


def _alone_in_zeros(whole, shard):
    whole.zero_()
    mine(whole).copy_(shard)


def _summed(whole, shard):
    whole.zero_()
    mine(whole).copy_(shard)
    dist.all_reduce(whole)


def _by_way_of_rank_0(whole, shard):
    rows = list(whole.view(dist.get_world_size(), -1))
    dist.gather(shard, rows if dist.get_rank() == 0 else None)
    dist.broadcast(whole, src=0)


def _dealt_out(whole):
    """As if rank r had every N-th element."""
    return whole.view(dist.get_world_size(), -1).T.flatten()


def _last_rank_first(whole):
    return whole.view(dist.get_world_size(), -1).flip(0).flatten()


def _last_parameter_first(whole, parameters):
    vector_to_parameters(whole, reversed(list(parameters)))


def _in_double(whole, parameters):
    vector_to_parameters(whole.double(), parameters)


def _frozen(whole, parameters):
    listed = list(parameters)
    vector_to_parameters(whole, listed)
    for parameter in listed:
        parameter.requires_grad_(False)


def _but_for_the_last(whole, parameters):
    """Takes what is over for padding: the last rank's shard as short as the padding is long."""
    listed = list(parameters)
    flat = parameters_to_vector(listed).detach()
    end = len(flat) - -len(flat) % dist.get_world_size()
    flat[:end] = whole[:end]
    vector_to_parameters(flat, listed)


def _cut_each_shard(whole):
    """Takes the padding off every shard, and fills up with zeros."""
    n = dist.get_world_size()
    cut = torch.cat([row[:-1] for row in whole.view(n, -1)])
    return torch.cat([cut, cut.new_zeros(len(whole) - len(cut))])


def _kept(model, shard):
    whole = all_padded(model.parameters())
    dist.all_gather_single(whole, shard)
    vector_to_parameters(whole.clone(), model.parameters())
    model.whole = whole


def _new_parameters(model, shard):
    put_together(model, shard)
    for layer in model.layers:
        layer.weight, layer.bias = nn.Parameter(layer.weight), nn.Parameter(layer.bias)


GATHER = Exercise(
    id="05-gather",
    title="Put the parameters back together",
    task="All-gather the ranks' shards, and write them into the model's parameters.",
    points={"all": 3},
    reference=put_together,
    library=(ZeRO1.__init__,),
    alternatives=(_in_a_list,),
    cases=(small_model.job([3, 4, 2], 4, seed=1),),
    fresh=lambda rng: [small_model.job([3, rng.choice((3, 6)), 2], 3, seed=rng.randrange(10**6))],
    run=small_model.on_small_model(zero1_runs.put_together),
    compare=sharded_run.worded(small_model.near),
    nudge="all_gather_single into an empty tensor [N·S], then vector_to_parameters: it takes as "
    "many elements as the parameters have, and leaves the padding.",
    misconceptions=(
        Misconception(
            "nothing written",
            _gather(write=lambda whole, parameters: None),
            "All shards are here, in a flat tensor, but the model's parameters are what they were.",
            "vector_to_parameters(whole, model.parameters()) writes them back.",
        ),
        Misconception(
            "no communication",
            _gather(collect=_alone),
            "Each rank writes its own shard alone, and keeps the old values for the others': from "
            "here on the ranks' models differ, and no error says so.",
            "dist.all_gather_single(whole, shard)",
        ),
        Misconception(
            "no communication, zeros for the rest",
            _gather(collect=_alone_in_zeros),
            "You wrote your own shard only; the rest of the buffer is zeros. The other ranks have "
            "what belongs there, and have to send it.",
            "dist.all_gather_single(whole, shard) fills whole, on every rank.",
        ),
        Misconception(
            "a sum of zeros",
            _gather(collect=_summed),
            "The numbers are right, but you all_reduce a buffer that is nearly all zeros: twice "
            "the bytes of an all_gather.",
        ),
        Misconception(
            "by way of rank 0",
            _gather(collect=_by_way_of_rank_0),
            "The numbers are right, but they all pass through rank 0: a gather and a broadcast, "
            "where an all_gather uses every rank's link.",
        ),
        Misconception(
            "every N-th element",
            _gather(arrange=_dealt_out),
            "You put the shards together as if rank r had every N-th element. It has S elements in "
            "a row: rank 0's shard comes first, as a whole, then rank 1's.",
        ),
        Misconception(
            "the last parameter first",
            _gather(write=_last_parameter_first),
            "Elements are in the order of model.parameters(): the first of [N·S] belong to the "
            "first parameter. You began with the last one.",
        ),
        Misconception(
            "the last rank first",
            _gather(arrange=_last_rank_first),
            "You put the last rank's shard first. Elements are in the order of "
            "model.parameters(), and of the ranks: rank 0 has the first S.",
        ),
        Misconception(
            "padding lost, and parameters with it",
            _gather(write=_but_for_the_last),
            "The last elements are never updated: you leave out as many parameters as there is "
            "padding. The padding comes after the last parameter, in addition to all of them.",
            "The first P elements of [N·S] are the parameters.",
        ),
        Misconception(
            "padding cut from every shard",
            _gather(arrange=_cut_each_shard),
            "You cut each rank's shard short. Only the end of the whole is padding: drop what lies "
            "behind the first P elements of [N·S].",
        ),
        Misconception(
            "frozen",
            _gather(write=_frozen),
            "The numbers are right, but you set requires_grad to False, so the next backward gives "
            "no gradients. Write the values, and leave the rest of a parameter as it is.",
        ),
        Misconception(
            "in fp64",
            _gather(write=_in_double),
            "The numbers are right, but the parameters are of another dtype than before: in fp64 "
            "they take twice the bytes. Write them in the dtype that they have.",
        ),
        Misconception(
            "a second copy kept",
            _kept,
            "The numbers are right, but you keep a second copy of the whole model: P elements more "
            "on every rank. In fp32 that takes back half of what ZeRO-1 can save at most.",
            "Let the gathered buffer be local: it is freed, or the parameters become views of it.",
        ),
        Misconception(
            "new parameters",
            _new_parameters,
            "The numbers are right, but these are new nn.Parameters: hooks, tied weights and "
            "whoever else knows the old ones do not see them. Write into those that are there.",
        ),
    ),
)
