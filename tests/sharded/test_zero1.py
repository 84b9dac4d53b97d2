"""ZeRO-1 against one process, the ledger, and PyTorch's DDP with ZeroRedundancyOptimizer."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_cases import (
    ADAMW,
    WORLDS,
    Decoder,
    Net,
    by_decay,
    check_alike,
    check_bytes_and_collectives,
    check_training,
    one_thread,  # noqa: F401 (a fixture)
    side_by_side,
)

from course_lib import ranks
from course_lib.sharded.zero1 import ZeRO1


@pytest.mark.parametrize("world_size", WORLDS)
def test_trains_as_one_process(world_size):
    check_training(ZeRO1, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_and_collectives_are_those_of_the_ledger(world_size):
    check_bytes_and_collectives(ZeRO1, "zero1", world_size)


def test_trains_as_ddp_with_zero_redundancy_optimizer():
    def fn():
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        torch.set_num_threads(1)
        optimizer_class, options = ADAMW
        ours, module = Decoder(), Decoder()
        zero = ZeRO1(ours, optimizer_class, bucket_bytes=4_000, **options)
        module.load_state_dict(ours.state_dict())
        theirs = nn.parallel.DistributedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class, **options)
        losses = side_by_side(ours, zero, theirs, optimizer)
        return losses, ours.state_dict(), module.state_dict()

    for losses, ours, theirs in ranks.run(fn, world_size=3):
        check_alike(losses, ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_goes_on_from_a_state_dict(dtype):
    def fn():
        torch.set_num_threads(1)

        def start(seed):
            torch.manual_seed(seed)
            model = Net().to(dtype)
            return model, ZeRO1(model, ADAMW[0], groups=by_decay(model), **ADAMW[1])

        def go_on(model, zero):
            for n in range(3):
                zero.backward(model(n, dist.get_rank(), 0))
                zero.step()
                zero.zero_grad()

        go_on(*(first := start(0)))
        saved = copy.deepcopy([each.state_dict() for each in first])
        for each, state in zip(second := start(1), saved, strict=True):
            each.load_state_dict(state)
        go_on(*first)
        go_on(*second)
        return [model.state_dict() for model, _ in (first, second)], saved[0]

    for (first, second), saved in ranks.run(fn, world_size=2):
        torch.testing.assert_close(second, first, rtol=0, atol=0)
        assert any((first[name] != saved[name]).any() for name in saved)


def test_the_state_of_another_layout_is_refused():
    def fn():
        states = [
            ZeRO1(nn.Linear(3, 3), torch.optim.SGD, bucket_bytes=nbytes).state_dict()
            for nbytes in (8, 1_000)
        ]
        ZeRO1(nn.Linear(3, 3), torch.optim.SGD, bucket_bytes=8).load_state_dict(states[0])
        ZeRO1(nn.Linear(3, 3), torch.optim.SGD, bucket_bytes=8).load_state_dict(states[1])

    with pytest.raises(ranks.RankError, match="CourseError: The state is that of .*'bucket': 12"):
        ranks.run(fn, world_size=2)


def test_a_step_without_a_gradient_is_one_with_gradients_of_zero():
    def fn():
        module = nn.Linear(3, 3)
        before = module.weight.detach().clone()
        zero = ZeRO1(module, torch.optim.SGD, lr=0.5, weight_decay=0.5)
        return zero.step(), before, module.weight.detach()

    norm, before, after = ranks.run(fn, world_size=2)[0]
    assert norm == 0
    torch.testing.assert_close(after, 0.75 * before)


def test_a_bucket_holds_at_least_a_byte():
    def fn():
        ZeRO1(nn.Linear(3, 3), torch.optim.SGD, bucket_bytes=0)

    with pytest.raises(ranks.RankError, match="bucket_bytes"):
        ranks.run(fn, world_size=1)


def test_groups_must_be_the_trained_parameters():
    def fn(which):
        module, other = nn.Linear(3, 3), nn.Linear(3, 3)
        groups = {
            "bias 0 times": [{"params": [module.weight]}],
            "weight 2 times": [{"params": module.parameters()}, {"params": [module.weight]}],
            "2 parameters that": [{"params": [*module.parameters(), *other.parameters()]}],
            "a dict": [{"params": set(module.parameters())}],
            "a Parameter": module.parameters(),
        }
        ZeRO1(module, torch.optim.SGD, groups=groups[which])

    for which in ("bias 0 times", "weight 2 times", "2 parameters that", "a dict", "a Parameter"):
        with pytest.raises(ranks.RankError, match=f"CourseError: The groups hold {which}"):
            ranks.run(fn, world_size=1, args=(which,))


def test_parameters_that_were_replaced_are_not_passed_over_in_silence():
    def fn(how):
        module = nn.Linear(3, 3)
        zero = ZeRO1(module, torch.optim.SGD, lr=0.5)
        if how == "cast":
            module.double()
        elif how == "assigned":
            module.load_state_dict(nn.Linear(3, 3).state_dict(), assign=True)
        else:
            nn.utils.vector_to_parameters(torch.ones(12), module.parameters())
        zero.step()

    for how in ("cast", "assigned", "from a vector"):
        with pytest.raises(ranks.RankError, match="parameters were replaced after ZeRO was made"):
            ranks.run(fn, world_size=1, args=(how,))
