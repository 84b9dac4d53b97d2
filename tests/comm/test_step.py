"""A step's plan against formulas, the ledger's shards, and sums by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import comm
from course_lib.comm.units import units
from course_lib.errors import CourseError
from course_lib.ledger import model_states
from course_lib.models import build
from course_lib.sharded import wrapping
from course_lib.specs import (
    PRECISIONS,
    SHARDED,
    Collective,
    ModelSpec,
    Recipe,
    Strategy,
    model,
    models,
)

LAB = model("lab-25m")
PAPER = model("paper-7.5b")
P = PAPER.parameters
SOME = [model(name) for name in ("lab-25m", "gpt2", "paper-7.5b", "llama3-8b")]
DENSE = [name for name in models() if not model(name).num_experts]


def lines(strategy, recipe=None, spec=LAB, **options):
    return comm.step(spec, recipe or Recipe("fp32"), strategy, **options).lines


def test_multiples_of_p_on_64_ranks_exactly():
    """P of 16 bits, which 64 divides: the volumes of the ZeRO paper with the ring's 63/64."""
    once = 63 * P // 64 * 2
    expected = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3, "fsdp": 3}
    for name, multiple in expected.items():
        plan = comm.step(PAPER, Recipe("zero-fp16"), Strategy(name, 64))
        assert plan.bytes_per_rank == multiple * once, name


def test_micro_batches_repeat_what_a_sharded_copy_needs():
    once = 63 * P // 64 * 2
    expected = {"ddp": 2, "zero1": 2, "zero2": 5, "zero3": 12, "fsdp": 12}
    for name, multiple in expected.items():
        plan = comm.step(PAPER, Recipe("zero-fp16", grad_accum=4), Strategy(name, 64))
        assert plan.bytes_per_rank == multiple * once, name


def test_hsdp_by_hand():
    """In nodes of 8, three times 7/8 P. Between 8 nodes 2 · 7/8 of an eighth of P."""
    plan = comm.step(PAPER, Recipe("zero-fp16"), Strategy("hsdp", 64))
    within = 7 * P // 8 * 2
    assert plan.bytes_by_kind() == {
        "all_gather": 2 * within,
        "reduce_scatter": within,
        "all_reduce": 2 * 7 * (P // 64) * 2,
    }
    assert [line.between_nodes for line in plan.lines] == [False, False, False, True]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 7, 64])
@pytest.mark.parametrize("spec", SOME, ids=lambda spec: spec.name)
def test_shards_are_those_of_the_memory_ledger(name, ranks, spec):
    """What a rank keeps of a gradient, it gets in a reduce_scatter: ranks - 1 chunks of that."""
    strategy = Strategy(name, ranks, wrap="model")
    ledger = model_states(spec, Recipe("fp32"), strategy)
    plan = comm.step(spec, Recipe("fp32"), strategy)
    moments = [line.bytes for line in ledger.lines if "exp_avg" in line.what]
    assert plan.bytes_by_kind()["reduce_scatter"] == (ranks - 1) * moments[0]


@settings(max_examples=40)
@given(st.sampled_from(DENSE), st.sampled_from(list(SHARDED)), st.integers(1, 6))
def test_units_and_buckets_leave_nothing_out_and_count_nothing_twice(name, strategy, nodes):
    """However it is cut, padding adds less than a rank's row for each tensor."""
    spec, gpus = model(name), 4 * nodes
    plan = comm.step(spec, Recipe("fp32"), Strategy(strategy, gpus, 4))
    first = plan.lines[0]
    elements = sum(collective.elements * times for collective, times in first.runs)
    widest = max((x.numel // x.shape[0] for x in spec.tensors()), default=1)
    padding = elements - spec.parameters
    assert 0 <= padding <= max(1, len(spec.tensors())) * gpus * widest
    if strategy == "ddp":
        assert padding == 0


# dtypes


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_moves_at_its_own_width(name):
    precision = PRECISIONS[name]
    width = {"fp32": 4, "bf16": 2, "fp16": 2}
    gradients, parameters = lines(Strategy("zero1", 4), Recipe(name))
    assert gradients.collectives[0].itemsize == width[precision.gradients]
    assert parameters.collectives[0].itemsize == width[precision.parameters]


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "hsdp"])
def test_fsdp_bf16_gathers_and_reduces_bf16(strategy):
    plan = lines(Strategy(strategy, 8, 4), Recipe("fsdp-bf16"))
    assert {each.itemsize for line in plan for each in line.collectives} == {2}
    (gradients,) = lines(Strategy("ddp", 4), Recipe("fsdp-bf16"))
    assert gradients.collectives[0].itemsize == 4


# Buckets of a flat space


@given(
    st.integers(1, 3000),
    st.integers(1, 9),
    st.integers(1, 5000),
    st.sampled_from(["fp32", "megatron-bf16", "pure-bf16"]),
)
def test_a_flat_space_is_cut_into_full_buckets_and_a_last_one(count, ranks, nbytes, precision):
    """One after another, until nothing is left of a rank's shard."""
    spec = ModelSpec("bare", "bare", count=count)
    width = {"fp32": 4, "bf16": 2}[PRECISIONS[precision].parameters]
    pieces, left = [], -(-count // ranks)
    while left:
        pieces.append(min(left, max(nbytes // width // ranks, 1)))
        left -= pieces[-1]
    for line in lines(Strategy("zero1", ranks), Recipe(precision), spec, bucket_bytes=nbytes):
        issued = [each.elements for each, times in line.runs for _ in range(times)]
        assert issued == [ranks * piece for piece in pieces]


def test_micro_batches_repeat_zero2s_buckets_and_bytes_do_not_depend_on_them():
    """lab-25m on 4 ranks: 24,771,152 padded elements of 4 bytes are four buckets of 25 MiB."""
    for name, rounds in (("zero1", 1), ("zero2", 3)):
        strategy, recipe = Strategy(name, 4), Recipe("fp32", grad_accum=3)
        plan = comm.step(LAB, recipe, strategy)
        assert plan.counts() == {"reduce_scatter": 4 * rounds, "all_gather": 4}
        small = comm.step(LAB, recipe, strategy, bucket_bytes=2**20)
        assert small.counts() == {"reduce_scatter": 95 * rounds, "all_gather": 95}
        assert small.bytes_by_kind() == plan.bytes_by_kind()


def test_many_buckets_are_counted_without_being_listed():
    spec = ModelSpec("bare", "bare", count=10**15)
    scattered, gathered = lines(Strategy("zero2", 64), Recipe("pure-bf16"), spec)
    assert len(scattered.collectives) == len(gathered.collectives) == 2
    assert scattered.count == gathered.count == -(-(10**15) // (64 * (25 * 2**20 // 2 // 64)))
    assert scattered.bytes_per_rank == 63 * 10**15 // 64 * 2


# Units


def test_layers_and_the_root():
    gather, again, reduce = lines(Strategy("fsdp", 4))
    assert [len(line.collectives) for line in (gather, again, reduce)] == [9, 8, 9]
    rest = (2 * 8195 + 1) * 450  # the embedding, the head and the last norm
    rows = 2 * -(-8195 // 4) * 4 * 450 + -(-450 // 4) * 4
    assert gather.collectives[0].elements == rows
    assert 0 < rows - rest < 4 * 3 * 450


def test_wrap_model_has_the_root_alone_and_gathers_once():
    gather, reduce = lines(Strategy("fsdp", 4, wrap="model"))
    assert (gather.kind, gather.count, reduce.kind, reduce.count) == (
        "all_gather",
        1,
        "reduce_scatter",
        1,
    )


def test_nothing_is_gathered_again_where_nothing_is_freed():
    kept = Strategy("fsdp", 4, reshard_after_forward=False)
    assert [line.kind for line in lines(kept)] == ["all_gather", "reduce_scatter"]


def test_the_smallest_modules_that_are_large_enough_are_units():
    """The embedding and the head have 3.7 million parameters each, a block 2.2, its MLP 1.6 and its
    attention 0.5. With 1: each MLP, the embedding and the head, and the decoder has the rest. With
    2: blocks in place of MLPs, and a norm is left to the root. With 3: the decoder has the blocks.
    With 4: the embedding too, and the head is the root's. With 30, all is.
    """
    found = {}
    for millions in (1, 2, 3, 4, 30):
        first, *others = lines(Strategy("fsdp", 4, wrap=f"{millions}000000-params"))
        found[millions] = first.count, others[0].count
    assert found == {1: (11, 11), 2: (11, 10), 3: (3, 3), 4: (2, 1), 30: (1, 1)}


@pytest.mark.parametrize("least", [1, 300_000, 1_000_000, 3_000_000])
def test_units_by_size_are_those_of_the_policy(least):
    """Of sharded.wrapping, which has the model itself."""
    built = build(LAB)
    names = {module: name for name, module in built.named_modules()}
    chosen = {names[module] for module in wrapping.by_size(built, least)}
    cut = units(LAB, Strategy("fsdp", 4, wrap=f"{least}-params"))
    assert {unit.name for unit in cut if not unit.root} == chosen


def test_units_by_hand():
    linears = {x.name.removesuffix(".weight") for x in LAB.tensors() if len(x.shape) == 2}
    gather, again, _ = lines(Strategy("fsdp", 4), by_hand=linears)
    assert (gather.count, again.count) == (len(linears) + 1, len(linears))  # the root has norms
    wrapped = {f"model.layers.{i}._checkpoint_wrapped_module" for i in range(8)}
    assert lines(Strategy("fsdp", 4), by_hand=wrapped) == lines(Strategy("fsdp", 4))
    assert lines(Strategy("fsdp", 4), by_hand=()) == lines(Strategy("fsdp", 4, wrap="model"))
    with pytest.raises(CourseError, match="'model.layer.0' was to be a unit"):
        lines(Strategy("fsdp", 4), by_hand={"model.layer.0"})


def test_a_tied_embedding_is_the_roots_whatever_is_wrapped():
    tied = replace(LAB, tied_embeddings=True)
    for wrap in ("layer", "model", "1-params", "3000000-params"):
        (root,) = (unit for unit in units(tied, Strategy("fsdp", 4, wrap=wrap)) if unit.root)
        assert "model.embed_tokens.weight" in {tensor.name for tensor in root.tensors}


# What is left after forward


def test_resharded_to_a_number_of_ranks_backward_gathers_among_these():
    gather, again, reduce = lines(Strategy("fsdp", 8, reshard_after_forward=2))
    assert again.collectives == tuple(
        replace(each, ranks=2) for each in gather.collectives[1:]
    )  # the same whole parameters, without the root's
    assert again.bytes_per_rank == sum(each.payload for each in again.collectives) // 2
    assert reduce.collectives == lines(Strategy("fsdp", 8))[2].collectives


def test_hsdp_reshards_within_its_nodes():
    (line,) = (
        x for x in lines(Strategy("hsdp", 16, 8, reshard_after_forward=4)) if "again" in x.why
    )
    assert {each.ranks for each in line.collectives} == {4}


@pytest.mark.parametrize(("strategy", "blocks"), [("fsdp", 8), ("zero3", 11)])
def test_a_checkpoint_around_units_costs_a_third_gather(strategy, blocks):
    twice = comm.step(LAB, Recipe("fp32"), Strategy(strategy, 4))
    thrice = comm.step(LAB, Recipe("fp32"), Strategy(strategy, 4), recompute_gathers=True)
    assert thrice.counts()["all_gather"] == twice.counts()["all_gather"] + blocks
    again = twice.lines[1].bytes_per_rank
    assert thrice.bytes_per_rank == twice.bytes_per_rank + again


def test_nothing_is_gathered_a_third_time_where_nothing_is_freed():
    kept = Strategy("fsdp", 4, reshard_after_forward=False)
    assert lines(kept, recompute_gathers=True) == lines(kept)


# Between GPU and host


def test_offloaded_shards_go_to_the_gpu_each_time_they_are_gathered():
    recipe = Recipe("fp32", grad_accum=3)
    shards = [unit.shard for unit in units(LAB, Strategy("fsdp", 4))]
    root, total = shards[0], sum(shards)
    moved = {
        reshard: comm.offloaded(
            LAB, recipe, Strategy("fsdp", 4, reshard_after_forward=reshard, offload="all")
        )
        for reshard in (True, False, 2)
    }
    assert moved[True].to_device == 3 * 4 * (2 * total - root)
    assert moved[False].to_device == moved[2].to_device == 3 * 4 * total
    assert {each.to_host for each in moved.values()} == {3 * 4 * total}
    assert comm.offloaded(LAB, recipe, Strategy("fsdp", 4)).total == 0


def test_an_offloaded_optimizer_gets_gradients_and_gives_parameters():
    moved = comm.offloaded(
        PAPER, Recipe("megatron-bf16"), Strategy("zero1", 64, offload="optimizer")
    )
    assert (moved.to_device, moved.to_host) == (2 * P // 64, 4 * P // 64)


@given(st.integers(1, 30_000_000))
def test_coarser_units_are_fewer(least):
    finer, coarser = (
        comm.step(LAB, Recipe("fp32"), Strategy("fsdp", 4, wrap=f"{n}-params")).count
        for n in (least, 2 * least)
    )
    assert coarser <= finer


def test_zero3_gathers_blocks_and_what_is_beside_them_one_by_one():
    gather, again, reduce = lines(Strategy("zero3", 7))
    names = ["embed_tokens", *(f"layers.{i}." for i in range(8)), "model.norm", "lm_head"]
    padded = [sum(-(-x.numel // 7) * 7 for x in LAB.tensors() if name in x.name) for name in names]
    assert [each.elements for each in gather.collectives] == padded
    assert gather.collectives == again.collectives
    assert [each.elements for each in reduce.collectives] == padded


@pytest.mark.parametrize(("name", "own"), [("llama3-8b", 0), ("phi-2", 51_200)])
def test_a_tied_head_is_in_the_unit_of_the_embedding(name, own):
    """Phi's has a bias of its own, one element for each of its 51,200 tokens."""
    spec = model(name)
    tied = replace(spec, tied_embeddings=True)
    first, *others, head = lines(Strategy("zero3", 1), spec=spec)[0].collectives
    joined, *rest = lines(Strategy("zero3", 1), spec=tied)[0].collectives
    assert rest == others
    assert joined.elements == first.elements + own
    assert head.elements == first.elements + own  # its weight has the shape of the embedding's


# Frozen parameters


@given(st.floats(0, 1), st.integers(1, 9))
def test_frozen_parameters_have_no_gradients(trainable, ranks):
    recipe = Recipe("fp32", trainable=trainable)
    trained = recipe.trained(LAB.parameters)
    for name in ("ddp", "zero1", "zero2"):
        moved = lines(Strategy(name, ranks), recipe)
        for line in moved:
            elements = sum(each.elements * times for each, times in line.runs)
            assert trained <= elements < trained + ranks
        assert bool(moved) == bool(trained)


def test_frozen_parameters_are_gathered_all_the_same():
    whole, part = (lines(Strategy("fsdp", 4), Recipe("fp32", trainable=x)) for x in (1.0, 0.25))
    assert whole[:2] == part[:2]
    ratio = part[2].bytes_per_rank / whole[2].bytes_per_rank
    assert ratio == pytest.approx(0.25, rel=1e-4)


def test_where_nothing_is_trained_there_is_no_backward():
    (gather,) = lines(Strategy("fsdp", 4), Recipe("fp32", trainable=0))
    assert (gather.kind, gather.count) == ("all_gather", 9)
    assert comm.zero_redundancy(LAB, Recipe(trainable=0), 4).lines == ()


# What else there is


def test_the_caps_of_buckets():
    strategy = Strategy("ddp", 2)
    (default,) = lines(strategy)
    (same,) = lines(strategy, bucket_bytes=25 * 2**20, first_bucket_bytes=25 * 2**20)
    (small,) = lines(strategy, bucket_bytes=2**20)
    (first,) = lines(strategy, first_step=True)
    assert [default.count, same.count, first.count] == [4, 4, 1]
    assert small.count > 20
    assert {
        sum(each.elements for each in line.collectives) for line in (default, same, small, first)
    } == {LAB.parameters}
    assert same.collectives != default.collectives
    with pytest.raises(CourseError, match="cap is 0"):
        lines(strategy, bucket_bytes=0)
    with pytest.raises(CourseError, match="bucket_bytes is 0"):
        lines(Strategy("zero2", 2), bucket_bytes=0)


@pytest.mark.parametrize("name", SHARDED)
def test_one_rank_moves_nothing(name):
    plan = comm.step(LAB, Recipe(), Strategy(name, 1, 1))
    assert plan.count > 0
    assert plan.bytes_per_rank == 0


def test_zero_redundancy_moves_three_times_p():
    plan = comm.zero_redundancy(PAPER, Recipe("zero-fp16"), 64)
    assert plan.bytes_by_kind() == {"all_reduce": 2 * 63 * P // 64 * 2, "broadcast": 2 * P}
    assert plan.lines[1].collectives == (Collective("broadcast", P, 2, 64),)
    (most,) = {line.count for line in comm.zero_redundancy(LAB, Recipe(), 4).lines[1:]}
    assert most == len(LAB.tensors())
