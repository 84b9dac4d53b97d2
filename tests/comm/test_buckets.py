"""Buckets, their order and their owners, against PyTorch's own functions, in one process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm, models, specs
from course_lib.comm.buckets import in_use_order
from course_lib.errors import CourseError

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

SIZES = st.lists(st.integers(1, 40), max_size=12)


def torchs_buckets(tensors, *caps):
    """As the reducer makes them anew: in the order given."""
    return dist._compute_bucket_assignment_by_size(tensors, caps)[0] if tensors else []


@given(SIZES, st.integers(1, 200), st.integers(1, 200))
def test_pytorchs_buckets(numels, first_cap, cap):
    tensors = [torch.empty(numel) for numel in numels]
    ours = comm.buckets([4 * numel for numel in numels], cap, first_cap)
    assert ours == torchs_buckets(tensors, first_cap, cap)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=12))
def test_pytorch_makes_the_buckets_of_each_dtype_by_themselves(tensors):
    dtypes = {True: torch.bfloat16, False: torch.float32}
    made = [torch.empty(numel, dtype=dtypes[half]) for numel, half in tensors]
    ours = []
    for half, dtype in dtypes.items():
        indices = [index for index, (_, is_half) in enumerate(tensors) if is_half == half]
        sizes = [made[index].numel() * dtype.itemsize for index in indices]
        for bucket in comm.buckets(sizes, 100, 50):
            ours.append([indices[place] for place in bucket])
    assert sorted(ours) == torchs_buckets(made, 50, 100)


def test_a_bucket_closes_when_it_reaches_its_cap():
    assert comm.buckets([60, 40, 99, 1, 500, 3], cap=100) == [[0, 1], [2, 3], [4], [5]]
    assert comm.buckets([60, 40, 99, 1], cap=100, first_cap=50) == [[0], [1, 2], [3]]
    assert comm.buckets([], cap=100) == []


@pytest.mark.parametrize("cap, first_cap", [(0, None), (1, 0), (2.5, None)])
def test_a_cap_is_a_whole_number_of_bytes(cap, first_cap):
    with pytest.raises(CourseError, match="cap is"):
        comm.buckets([1], cap, first_cap)


def ready_order(model, tokens):
    """Names of the parameters in the order in which backward finishes their gradients."""
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    output = model(tokens)
    getattr(output, "logits", output).float().logsumexp(-1).mean().backward()
    return order


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_ready_in_reverse_order_of_use(tied):
    config = {
        "model_type": "llama",
        "hidden_size": 18,
        "intermediate_size": 35,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": 101,
        "tie_word_embeddings": tied,
    }
    spec = specs.read_config(config)
    ready = ready_order(models.build(spec), torch.arange(8).view(1, 8))
    assert [tensor.name for tensor in in_use_order(spec)] == ready[::-1]


SMALL = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 301,
    "max_position_embeddings": 32,
}
PHI = {"num_attention_heads": 4, "num_key_value_heads": 4}
FAMILIES = {
    "llama, biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", **SMALL},
    "gemma2": {"model_type": "gemma2", **SMALL},
    "gpt2": {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 8, "vocab_size": 301},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL},
    "phi, qk-norm": {"model_type": "phi", **SMALL, **PHI, "qk_layernorm": True},
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_other_architectures_use_their_modules_in_that_order_too(config):
    """Down to the module: a weight and its bias are ready together."""
    transformers = pytest.importorskip("transformers")
    spec = specs.read_config(config)
    made = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made).float()
    ready = modules(ready_order(model, torch.arange(8).view(1, 8)))
    assert modules(tensor.name for tensor in in_use_order(spec)) == ready[::-1]


def modules(names):
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def test_experts_come_last_in_a_block_one_after_another():
    mixtral = specs.model("mixtral-8x7b")
    order = [x.name.split(".")[-2:-1][0] for x in in_use_order(mixtral) if x.layer == 0]
    assert order[-4:] == ["w2", "w1", "w3", "w2"]
    assert order.index("gate") < order.index("w1")
    assert len(in_use_order(mixtral)) == len(mixtral.tensors())


def test_a_bare_count_is_one_tensor():
    (tensor,) = in_use_order(specs.model("paper-7.5b"))
    assert tensor.numel == 7_500_000_000


@pytest.fixture(scope="module")
def zero_redundancy_optimizer():
    """For lab-25m's tensors, in a group of one rank, this process."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = specs.model("lab-25m").tensors()
    parameters = [torch.nn.Parameter(torch.empty(tensor.shape)) for tensor in tensors]
    yield ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_zero_redundancy_optimizers_owners(zero_redundancy_optimizer, ranks):
    """Made to cut for more ranks than there are."""
    zero_redundancy_optimizer.world_size = ranks
    zero_redundancy_optimizer._clear_cache()
    theirs = zero_redundancy_optimizer._param_to_rank
    parameters = zero_redundancy_optimizer.param_groups[0]["params"]
    ours = comm.owners([parameter.numel() for parameter in parameters], ranks)
    assert ours == [theirs[parameter] for parameter in parameters]
    assert set(ours) == set(range(ranks))


def test_owners_by_hand():
    """5 to rank 0, 4 to rank 1, 3 to rank 1 (which owns 4), 3 to rank 0 (5 against 7)."""
    assert comm.owners([3, 5, 3, 4], ranks=2) == [1, 0, 0, 1]
