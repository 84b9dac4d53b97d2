"""ZeRO-3 against one process, the ledger, and PyTorch's fully_shard."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from zero_cases import (
    ADAMW,
    EVEN,
    TIED,
    WORLDS,
    Decoder,
    Job,
    Net,
    Three,
    by_decay,
    check_alike,
    check_bytes_and_collectives,
    check_training,
    close,
    one_thread,  # noqa: F401 (a fixture)
    predicted,
    side_by_side,
    whole_state,
)

from course_lib import ranks
from course_lib.errors import CourseError
from course_lib.sharded.zero3 import ZeRO3
from course_lib.specs import Strategy

DEEP = replace(TIED, num_layers=3)


def stage(model, optimizer_class, bucket_bytes=None, **options):
    """There are no buckets. `Net` has modules that only some ranks use, so it is one unit."""
    units = [model] if isinstance(model, Net) else None
    return ZeRO3(model, optimizer_class, units=units, **options)


def by_tensor(job: Job, sharded) -> tuple[dict, dict, dict]:
    """What the ledgers say, and where blocks are frozen, what they say without those.

    A fraction does not tell them which tensors that is. But all of it adds up over units, so what
    a block costs is the difference between two blocks and one.
    """
    if not job.frozen:
        return predicted(job, sharded)
    job = replace(job, frozen=False)
    one, two = (
        predicted(replace(job, spec=replace(job.spec, num_layers=n)), sharded) for n in (1, 2)
    )
    frozen = [{key: b[key] - a[key] for key in a} for a, b in zip(one, two, strict=True)]
    kept = "parameters", "all_gather"
    return tuple(
        {key: of[key] - (key not in kept and block[key]) for key in of}
        for of, block in zip(one, frozen, strict=True)
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_trains_as_one_process(world_size):
    check_training(stage, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_and_collectives_are_those_of_the_ledger(world_size):
    check_bytes_and_collectives(stage, "zero3", world_size, by_tensor)


def test_where_a_fraction_can_be_exact_the_ledger_is():
    """Where ranks divide the sizes, and no steps are counted, a share of the bytes is exact."""
    job = Job(EVEN, optimizer="sgd-momentum", frozen=True)
    for world_size in WORLDS:
        sharded = Strategy("zero3", world_size)
        (states, _, sent), (exact, _, issued) = predicted(job, sharded), by_tensor(job, sharded)
        assert states == exact
        assert sent["all_gather"] == issued["all_gather"]


def test_trains_as_fully_shard():
    def fn():
        torch.set_num_threads(1)
        optimizer_class, options = ADAMW
        torch.manual_seed(0)
        ours, theirs = Decoder(DEEP), Decoder(DEEP)
        theirs.load_state_dict(ours.state_dict())
        zero = ZeRO3(ours, optimizer_class, **options)
        for block in theirs.llama.model.layers:
            fully_shard(block)
        fully_shard(theirs)
        optimizer = optimizer_class(theirs.parameters(), **options)
        losses = side_by_side(ours, zero, theirs, optimizer)
        whole = {name: value.full_tensor() for name, value in theirs.state_dict().items()}
        return losses, whole_state(ours, zero), whole

    for losses, ours, theirs in ranks.run(fn, world_size=3):
        check_alike(losses, ours, theirs)


# Between steps.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_goes_on_from_a_state_dict(dtype):
    def fn():
        torch.set_num_threads(1)

        def start(seed):
            torch.manual_seed(seed)
            model = Decoder(TIED).to(dtype)
            return model, ZeRO3(model, ADAMW[0], groups=by_decay(model), **ADAMW[1])

        def go_on(model, zero):
            for n in range(3):
                zero.backward(model(n, dist.get_rank(), 0))
                zero.step()
                zero.zero_grad()

        first, second = start(0), start(1)
        go_on(*first)
        saved, before = copy.deepcopy(first[1].state_dict()), whole_state(*first)
        second[1].load_state_dict(saved)
        go_on(*first)
        go_on(*second)
        return whole_state(*first), whole_state(*second), before

    for first, second, before in ranks.run(fn, world_size=2):
        torch.testing.assert_close(second, first, rtol=0, atol=0)
        assert any((first[name] != before[name]).any() for name in before)


def test_parameters_are_empty_but_where_they_are_gathered():
    def fn():
        torch.manual_seed(dist.get_rank())
        module = nn.Linear(3, 3)
        weight = module.weight.detach().clone()
        zero = ZeRO3(module, torch.optim.SGD, lr=1.0)
        with zero.gathered():
            with zero.gathered(), torch.inference_mode():
                made = module(torch.eye(3)) - module.bias
            whole = module.weight.detach().clone()
            again = module(torch.eye(3)).detach() - module.bias.detach()
        rest = module.weight.shape, zero.units[0].spaces[0].untyped_storage().nbytes()
        with torch.inference_mode():
            module(torch.eye(3))
        zero.backward(module(torch.eye(3)).sum())  # a gradient of 1 for each weight
        norm = zero.step()
        with zero.gathered():
            return weight, whole, made, again, rest, norm, module.weight.detach().clone()

    results = ranks.run(fn, world_size=2)
    for _, whole, made, again, rest, norm, after in results:
        assert torch.equal(whole, results[0][0])  # rank 0's
        close([made, again], [whole.T, whole.T], "outputs", 1e-5)
        assert rest == ((0,), 0)
        assert norm == pytest.approx((9 + 27) ** 0.5)  # of the bias each gradient is 3
        close(after, whole - 1, "weights", 1e-5)


def test_a_step_without_a_gradient_is_one_with_gradients_of_zero():
    def fn():
        module = nn.Linear(3, 3)
        zero = ZeRO3(module, torch.optim.SGD, lr=0.5, weight_decay=0.5)
        before = whole_state(module, zero)["weight"]
        return zero.step(), before, whole_state(module, zero)["weight"]

    norm, before, after = ranks.run(fn, world_size=2)[0]
    assert norm == 0
    torch.testing.assert_close(after, 0.75 * before)


def test_gradients_are_shards_of_their_mean_over_ranks_summed_over_micro_batches():
    def fn():
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model, alone = (Three() for _ in range(2))
        alone.load_state_dict(model.state_dict())
        zero = ZeRO3(model, torch.optim.SGD)
        for micro in range(2):
            zero.backward(model(0, dist.get_rank(), micro))
        loss = sum(alone(0, rank, micro) for rank in range(2) for micro in range(2)) / 2
        means = torch.autograd.grad(loss, list(alone.parameters()))
        (shard,) = zero.gradient_tensors()
        zero.zero_grad()
        return shard, torch.cat([mean.flatten() for mean in means]), zero.gradient_tensors()

    (first, (w0, w1, b), _), (second, _, left) = ranks.run(fn, world_size=2)
    torch.testing.assert_close(first, torch.stack([w0, b]))
    torch.testing.assert_close(second, torch.stack([w1, torch.zeros(())]))  # and padding
    assert left == []


# Errors.


def loss_backward():
    model = Decoder()
    ZeRO3(model, torch.optim.SGD)
    model(0, 0, 0).backward()


def foreign_unit():
    ZeRO3(nn.Linear(2, 2), torch.optim.SGD, units=[nn.Linear(2, 2)])


def two_dtypes():
    ZeRO3(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), torch.optim.SGD)


def nothing_trained():
    ZeRO3(nn.Linear(2, 2).requires_grad_(False), torch.optim.SGD)


def group_without_bias():
    module = nn.Linear(2, 2)
    ZeRO3(module, torch.optim.SGD, groups=[{"params": [module.weight]}])


def step_in_gathered():
    zero = ZeRO3(nn.Linear(2, 2), torch.optim.SGD)
    with zero.gathered():
        zero.step()


def prefetch_below_0():
    ZeRO3(nn.Linear(2, 2), torch.optim.SGD, prefetch=-1)


def other_units():
    model = Decoder()
    state = ZeRO3(Decoder(), torch.optim.SGD).state_dict()
    ZeRO3(model, torch.optim.SGD, units=[model]).load_state_dict(state)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (loss_backward, "did not await: call the backward"),
        (foreign_unit, "a unit that is not among the model's"),
        (two_dtypes, "given torch.float32, torch.float64"),
        (nothing_trained, "no trained parameter"),
        (group_without_bias, "The groups hold bias 0 times"),
        (step_in_gathered, "step, and load, outside of it"),
        (prefetch_below_0, "prefetch"),
        (other_units, "The state is that of .*'units': "),
    ],
)
def test_errors_say_what_to_do(fn, message):
    with pytest.raises(ranks.RankError, match=message) as caught:
        ranks.run(fn, world_size=1)
    assert isinstance(caught.value.__cause__, CourseError)
