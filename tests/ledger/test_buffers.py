"""Buffers by hand, and what must hold of them for every job."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import ledger, specs
from course_lib.comm.units import units
from course_lib.errors import CourseError
from course_lib.ledger import buffers
from course_lib.specs import Recipe, Strategy

LAB = specs.model("lab-25m")
LLAMA = specs.model("llama3-8b")
FP32 = Recipe("fp32")
GATHER, REDUCE = "gather_buffers", "reduce_buffers"


def held(strategy, recipe=FP32, model=LAB, **options):
    found = buffers(model, recipe, strategy, **options)
    return found.of(GATHER), found.of(REDUCE)


def sizes(strategy, model=LAB):
    """Bytes of the whole root and of a whole block, padded, in fp32."""
    root, block, *_ = (4 * strategy.shard_ranks * unit.shard for unit in units(model, strategy))
    return root, block


@pytest.mark.parametrize(("prefetch", "blocks"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_the_root_a_block_and_those_on_their_way(prefetch, blocks):
    """A block is there twice as it is copied out, then the last of the next ones is sent for."""
    strategy = Strategy("fsdp", 4)
    root, block = sizes(strategy)
    assert held(strategy, prefetch=prefetch)[0] == root + blocks * block
    assert held(strategy, prefetch=prefetch, gathers=1)[0] == root + 2 * block


def test_gradients_of_the_head_of_a_block_and_of_the_one_before():
    strategy = Strategy("fsdp", 4)
    _, block = sizes(strategy)
    found = buffers(LAB, FP32, strategy)
    whole, reduced = (line.bytes for line in found.lines if line.category == REDUCE)
    norm_and_head, a_block = 450 + 450 * 8195, sum(x.numel for x in LAB.block())
    assert whole == 4 * (norm_and_head + a_block)
    assert reduced == block + block // 4  # what comes of it, too


def test_what_is_kept_after_forward():
    """Nothing of all blocks, a half, or all. Then one after another is gathered, and freed."""
    root, block = sizes(Strategy("fsdp", 4))
    half = held(Strategy("fsdp", 4, reshard_after_forward=2))[0]
    assert half == root + 8 * block // 2 + 2 * block
    assert held(Strategy("fsdp", 4, reshard_after_forward=False))[0] == root + 8 * block


def test_one_unit_is_whole_and_its_gradients_are_copied():
    strategy = Strategy("fsdp", 4, wrap="model")
    padded = 4 * sum(4 * unit.shard for unit in units(LAB, strategy))
    assert held(strategy) == (padded, 4 * LAB.parameters + padded + padded // 4)


def test_hsdp_has_those_of_a_node_and_bf16_halves_them():
    node = held(Strategy("fsdp", 8), model=LLAMA)
    assert held(Strategy("hsdp", 64), model=LLAMA) == node
    gather, reduce = held(Strategy("fsdp", 8), Recipe("fsdp-bf16"), LLAMA)
    root, block = sizes(Strategy("fsdp", 8), LLAMA)
    assert (gather, reduce) == ((root + 2 * block + block // 8) // 2, node[1] // 2)  # a cast shard


def test_offloaded_shards_come_to_the_gpu():
    root, block = sizes(Strategy("fsdp", 4))
    assert held(Strategy("fsdp", 4, offload="all"))[0] == root + 2 * block + block // 4


def test_zero3_by_hand():
    """The head is the largest unit, the embedding as large; a block is the next."""
    strategy = Strategy("zero3", 4)
    cut = [4 * 4 * unit.shard for unit in units(LAB, strategy)]
    embedding, block, head = cut[0], cut[1], cut[-1]
    gather, reduce = held(strategy)
    assert gather == 2 * embedding == 2 * head
    assert held(strategy, prefetch=3)[0] == embedding + 3 * block  # as forward begins
    assert reduce == embedding + 5 * block // 2 + 4 * 450 * 8195  # two blocks are reduced meanwhile


def test_buckets():
    """Of 25 MiB, four; the last is not full. zero2 fills one while two are reduced."""
    assert held(Strategy("ddp", 4)) == (0, 0)
    shard, bucket = 4 * -(-LAB.parameters // 4), 25 * 2**20
    assert held(Strategy("zero1", 4)) == (0, shard + bucket)
    assert held(Strategy("zero2", 4)) == (0, 3 * bucket + 2 * bucket // 4)
    assert held(Strategy("zero2", 4), bucket_bytes=2**40)[1] == 4 * shard


def test_a_frozen_model_reduces_nothing():
    for name in ("zero3", "fsdp"):
        gather, reduce = held(Strategy(name, 4), Recipe("fp32", trainable=0))
        assert gather > 0 and reduce == 0


def test_model_states_are_what_they_were_and_prefetch_is_checked():
    states = ledger.model_states(LAB, FP32, Strategy("fsdp", 4))
    assert states.total == sum(line.bytes for line in states.lines)
    assert set(states.by_category()) == set(specs.MODEL_STATES)
    with pytest.raises(CourseError, match="prefetch is -1"):
        buffers(LAB, FP32, Strategy("fsdp", 4), prefetch=-1)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sampled_from(["lab-25m", "gpt2", "gemma2-9b", "paper-7.5b"]).map(specs.model),
    st.sampled_from(["layer", "model", "1-params", "5000000-params"]),
    st.sampled_from([True, False, 2]),
    st.integers(0, 3),
)
def test_more_is_never_less(model, wrap, reshard, prefetch):
    strategy = Strategy("fsdp", 8, wrap=wrap, reshard_after_forward=reshard)
    gather, reduce = held(strategy, model=model, prefetch=prefetch)
    assert 0 < gather <= held(strategy, model=model, prefetch=prefetch + 1)[0]
    everything = sum(8 * unit.shard for unit in units(model, strategy))
    assert gather <= 4 * 2 * everything + 4 * everything  # at most twice, and a part kept
    assert 0 < reduce <= 4 * (2 * everything + everything // 8 + 1)
