"""ZeRO-2 against one process, the ledger, and PyTorch's fully_shard."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from zero_cases import (
    ADAMW,
    SMALL,
    WORLDS,
    Decoder,
    check_alike,
    check_bytes_and_collectives,
    check_training,
    one_thread,  # noqa: F401 (a fixture)
    side_by_side,
)

from course_lib import ranks
from course_lib.comm.buckets import UNDER_WAY
from course_lib.errors import CourseError
from course_lib.measure import LiveBytes
from course_lib.sharded.zero2 import ZeRO2

BUCKET = 4_000  # bytes: the model fills six


@pytest.mark.parametrize("world_size", WORLDS)
def test_trains_as_one_process(world_size):
    check_training(ZeRO2, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_and_collectives_are_those_of_the_ledger(world_size):
    check_bytes_and_collectives(ZeRO2, "zero2", world_size)


def test_trains_as_fully_shard():
    def fn():
        torch.set_num_threads(1)
        optimizer_class, options = ADAMW
        ours, theirs = Decoder(), Decoder()
        zero = ZeRO2(ours, optimizer_class, bucket_bytes=BUCKET, **options)
        theirs.load_state_dict(ours.state_dict())
        fully_shard(theirs, reshard_after_forward=False)
        optimizer = optimizer_class(theirs.parameters(), **options)
        losses = side_by_side(ours, zero, theirs, optimizer)
        whole = {name: value.full_tensor() for name, value in theirs.state_dict().items()}
        return losses, ours.state_dict(), whole

    for losses, ours, theirs in ranks.run(fn, world_size=3):
        check_alike(losses, ours, theirs)


def test_a_gradient_is_freed_before_the_next_one_comes_and_buckets_when_they_have_come_back():
    """No view, closure or list keeps a whole gradient, nor more than a few buckets."""

    def fn():
        torch.set_num_threads(1)
        model = Decoder()
        storages, alive = [], []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: storages.append(StorageWeakRef(p.grad.untyped_storage()))
            )
        zero = ZeRO2(model, torch.optim.SGD, bucket_bytes=SMALL)

        def look(parameter):
            alive.append(sum(not storage.expired() for storage in storages))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(look)
        zero.backward(model(0, dist.get_rank(), 0))  # shows in which order buckets are complete
        with LiveBytes(model, zero) as live:
            for micro in (1, 2):
                zero.backward(model(0, dist.get_rank(), micro))
        buffers = [moment.live.get("reduce_buffers", 0) for moment in live.timeline]
        return len(storages), set(alive), max(buffers), len(zero.flat.buckets)

    for seen, alive, buffers, buckets in ranks.run(fn, world_size=2):
        assert seen == 3 * len(list(Decoder().parameters())) == 36
        assert alive <= {0, 1}, alive  # backward itself may still have the one at hand
        assert buckets > 40
        # Under way, each with its piece; being filled; and those at the borders of what is not.
        assert buffers <= UNDER_WAY * SMALL * 3 / 2 + 3 * SMALL


def test_buckets_leave_while_backward_goes_on_and_none_waits_from_the_second_on():
    def fn():
        torch.set_num_threads(1)
        model = Decoder()
        zero = ZeRO2(model, torch.optim.SGD, bucket_bytes=BUCKET)
        issued = {"norm": [], "embedding": []}

        def sent() -> int:
            return sum(entry.kind == "reduce_scatter" for entry in ranks.entries())

        decoder = model.llama.model
        norm = decoder.layers[0].input_layernorm.weight  # in the second bucket; the block's last
        norm.register_hook(lambda gradient: issued["norm"].append(sent()))
        embedding = decoder.embed_tokens.weight  # the last of all, in the last three of six
        embedding.register_hook(lambda gradient: issued["embedding"].append(sent()))
        for micro in range(2):
            zero.backward(model(0, dist.get_rank(), micro))
        return issued, sent()

    for issued, all_of_them in ranks.run(fn, world_size=2):
        assert all_of_them == 12
        assert issued["embedding"] == [3, 6 + 3]
        assert issued["norm"] == [1, 6 + 2]


def test_gradients_are_the_shards_of_their_mean_over_ranks_summed_over_micro_batches():
    def fn():
        torch.set_num_threads(1)
        model = Decoder()
        zero = ZeRO2(model, torch.optim.SGD)
        for micro in range(2):
            zero.backward(model(0, dist.get_rank(), micro))
        loss = sum(model(0, rank, micro) for rank in range(3) for micro in range(2)) / 3
        means = torch.autograd.grad(loss, list(model.parameters()))
        return zero.gradients, torch.cat([mean.flatten() for mean in means[::-1]])

    results = ranks.run(fn, world_size=3)
    whole = torch.cat([gradients for gradients, _ in results])
    for _, expected in results:
        torch.testing.assert_close(whole[: expected.numel()], expected, rtol=1e-4, atol=1e-6)


def test_a_backward_that_it_does_not_know_of_is_refused():
    def directly():
        model = Decoder()
        ZeRO2(model, torch.optim.SGD)
        model(0, 0, 0).backward()

    def twice():
        weight = torch.nn.Linear(2, 2, bias=False)
        zero = ZeRO2(weight, torch.optim.SGD)
        loss = torch.utils.checkpoint.checkpoint(
            lambda x: weight(weight(x)), torch.ones(2, requires_grad=True), use_reentrant=True
        )
        zero.backward((loss + weight(torch.ones(2))).sum())

    for fn in (directly, twice):
        with pytest.raises(ranks.RankError, match="did not await") as caught:
            ranks.run(fn, world_size=2)
        assert isinstance(caught.value.__cause__, CourseError)
