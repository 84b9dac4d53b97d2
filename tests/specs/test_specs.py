import math

import pytest

from course_lib import specs
from course_lib.errors import CourseError
from course_lib.specs import Cluster, ModelSpec, Recipe, Strategy


class TestPresets:
    def test_near_names_are_offered(self):
        with pytest.raises(CourseError, match="did you mean .*'llama3-8b'"):
            specs.model("lama3-8b")

    def test_where_no_name_is_near_all_are(self):
        with pytest.raises(CourseError, match="take one of gpt2, gpt2-xl, .*, lab-25m"):
            specs.model("zzzz")

    @pytest.mark.parametrize("name", [None, 3, ["gpt2"], ""])
    def test_what_is_no_name(self, name):
        with pytest.raises(CourseError, match="There is no model preset"):
            specs.model(name)

    def test_the_hubs_name_is_known(self):
        assert specs.model("meta-llama/Llama-2-7b-hf") == specs.model("llama2-7b")
        assert specs.model(" GPT2 ").name == "gpt2"


class TestModelSpec:
    def test_by_hand(self):
        sizes = dict.fromkeys(
            ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"), 8
        )
        spec = ModelSpec("mine", "llama", vocab_size=10, num_layers=1, **sizes)
        assert spec.parameters == 2 * 10 * 8 + 8 + 4 * 8 * 64 + 3 * 64 + 2 * 8

    @pytest.mark.parametrize(
        "wrong", [{"family": "lama"}, {"family": "llama"}, {"family": "bare", "count": -1}]
    )
    def test_nonsense(self, wrong):
        with pytest.raises(CourseError):
            ModelSpec("mine", **wrong)


class TestRecipe:
    def test_the_sixteen_bytes(self):
        copies = Recipe("zero-fp16", "adamw").copies()
        assert [(copy.category, copy.dtype, copy.bytes) for copy in copies] == [
            ("parameters", "fp16", 2),
            ("gradients", "fp16", 2),
            ("optimizer_states", "fp32", 4),
            ("optimizer_states", "fp32", 4),
            ("optimizer_states", "fp32", 4),
        ]

    @pytest.mark.parametrize(
        "precision, optimizer, expected",
        [
            ("zero-fp16", "adamw", 16),
            ("zero-bf16", "adamw", 16),
            ("megatron-bf16", "adamw", 18),
            ("megatron-fp16", "adamw", 20),
            ("megatron-fp32", "adamw", 16),
            ("fp32", "adamw", 16),
            ("amp-bf16", "adamw", 16),
            ("fsdp-bf16", "adamw", 16),
            ("pure-bf16", "adamw", 8),
            ("amp-bf16", "adamw-bf16", 12),
            ("zero-fp16", "adamw-bf16", 12),
            ("fp32", "sgd", 8),
            ("zero-fp16", "sgd", 8),
            ("fp32", "sgd-momentum", 12),
            ("pure-bf16", "sgd-momentum", 6),
        ],
    )
    def test_bytes_per_parameter(self, precision, optimizer, expected):
        assert Recipe(precision, optimizer).bytes_per_parameter == expected

    def test_every_precision_says_what_it_is_and_where_it_stands(self):
        assert all(recipe.note and recipe.source for recipe in specs.PRECISIONS.values())

    def test_the_trained_parameters_are_a_whole_number(self):
        assert Recipe(trainable=0.1).trained(24_771_150) == 2_477_115
        assert Recipe(trainable=0.0).trained(7) == 0

    @pytest.mark.parametrize(
        "wrong, told",
        [
            ({"precision": "bf16"}, "'amp-bf16'"),
            ({"optimizer": "adam"}, "'adamw'"),
            ({"checkpointing": "ful"}, "'full'"),
            ({"micro_batch": 0}, "micro_batch is 0"),
            ({"seq_len": -1}, "seq_len is -1"),
            ({"seq_len": 2048.0}, "seq_len is 2048.0"),
            ({"grad_accum": "4"}, "grad_accum is '4'"),
            ({"trainable": 1.5}, "trainable is 1.5"),
            ({"trainable": -0.1}, "trainable is -0.1"),
            ({"trainable": math.nan}, "trainable is nan"),
            ({"trainable": "all"}, "trainable is 'all'"),
        ],
        ids=str,
    )
    def test_nonsense(self, wrong, told):
        with pytest.raises(CourseError, match=told):
            Recipe(**wrong)


class TestStrategy:
    @pytest.mark.parametrize(
        "strategy, shard_ranks, replicas",
        [
            (Strategy("ddp", 16), 1, 16),
            (Strategy("zero1", 16), 16, 1),
            (Strategy("fsdp", 16), 16, 1),
            (Strategy("hsdp", 16), 8, 2),
            (Strategy("hsdp", 16, gpus_per_node=4), 4, 4),
        ],
    )
    def test_over_how_many_ranks_it_shards(self, strategy, shard_ranks, replicas):
        assert (strategy.shard_ranks, strategy.replicas) == (shard_ranks, replicas)

    def test_what_is_left_after_forward_is_on_so_many_ranks(self):
        assert Strategy("fsdp", 16).near_ranks == 16
        assert Strategy("hsdp", 16, reshard_after_forward=False).near_ranks == 8
        assert Strategy("hsdp", 16, reshard_after_forward=4).near_ranks == 4

    def test_each_stage_of_zero_shards_one_category_more(self):
        ladder = [Strategy(name).sharded for name in ("ddp", "zero1", "zero2", "zero3")]
        assert [len(sharded) for sharded in ladder] == [0, 1, 2, 3]
        assert all(set(a) < set(b) for a, b in zip(ladder, ladder[1:], strict=False))

    @pytest.mark.parametrize("wrap", ["layer", "model", "100000000-params"])
    def test_wrap(self, wrap):
        assert Strategy("fsdp", wrap=wrap).wrap == wrap

    @pytest.mark.parametrize(
        "wrong, told",
        [
            ({"name": "zero4"}, "'zero3'"),
            ({"gpus": 0}, "gpus is 0"),
            ({"gpus": -4}, "gpus is -4"),
            ({"gpus": 2.5}, "gpus is 2.5"),
            ({"gpus_per_node": 0}, "gpus_per_node is 0"),
            ({"name": "hsdp", "gpus": 12}, "12 GPUs do not fill nodes of 8"),
            ({"name": "hsdp", "gpus": 4}, "take fsdp"),
            ({"offload": "everything"}, "no offload"),
            ({"offload": "all"}, "ddp needs its parameters whole"),
            ({"name": "zero2", "offload": "all"}, "zero2 needs its parameters whole"),
            ({"wrap": "0-params"}, "wrap is '0-params'"),
            ({"wrap": "layers"}, "wrap is 'layers'"),
            ({"wrap": 3}, "wrap is 3"),
            ({"name": "zero3", "gpus": 4, "reshard_after_forward": 2}, "not zero3"),
            ({"name": "fsdp", "gpus": 4, "reshard_after_forward": 3}, "sharded among 4 ranks"),
            ({"name": "hsdp", "gpus": 16, "reshard_after_forward": 16}, "sharded among 8 ranks"),
            ({"name": "fsdp", "reshard_after_forward": 0}, "reshard_after_forward is 0"),
            ({"name": "fsdp", "reshard_after_forward": "no"}, "reshard_after_forward is 'no'"),
        ],
        ids=str,
    )
    def test_nonsense(self, wrong, told):
        with pytest.raises(CourseError, match=told):
            Strategy(**wrong)


class TestCluster:
    def test_gpus_and_links_of_the_tables(self):
        h100 = specs.gpu("h100-sxm-80")
        assert h100.memory_bytes == 80 * 2**30
        assert (h100.bf16_tflops, h100.matmul_tflops) == (989, 794.5)
        assert specs.gpu("l40s-48").matmul_tflops is None
        assert specs.link("ib-ndr").gb_s == 50
        assert all(specs.gpu(name).memory_bytes > 0 for name in specs.gpus())
        assert all(specs.link(name).gb_s > 0 for name in specs.links())

    def test_nodes(self):
        assert [Cluster(gpus=n).nodes for n in (1, 8, 9)] == [1, 1, 2]

    @pytest.mark.parametrize(
        "wrong, told",
        [
            ({"gpu": "h100"}, "'h100-sxm-80'"),
            ({"link": "ib"}, "'ib-"),
            ({"gpus": 0}, "gpus is 0"),
            ({"gpus_per_node": 0}, "gpus_per_node is 0"),
        ],
    )
    def test_nonsense(self, wrong, told):
        with pytest.raises(CourseError, match=told):
            Cluster(**wrong)
