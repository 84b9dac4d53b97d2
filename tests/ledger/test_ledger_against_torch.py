"""The ledger against PyTorch itself: live bytes of tensors after an AdamW step."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from course_lib import specs  # noqa: E402
from course_lib.ledger import model_states  # noqa: E402
from course_lib.models import build  # noqa: E402
from course_lib.specs import Recipe, Strategy  # noqa: E402

# Five rows, seven columns and the like: nothing that ranks divide.
TINY = specs.read_config(
    {
        "model_type": "llama",
        "hidden_size": 18,
        "intermediate_size": 35,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": 101,
    }
)
TOKENS = torch.arange(24).view(2, 12)
DTYPES = {"fp32": torch.float32, "pure-bf16": torch.bfloat16}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def nbytes(tensors) -> int:
    return sum(local(tensor).numel() * local(tensor).element_size() for tensor in tensors)


def live(model, optimizer) -> dict[str, int]:
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": nbytes(parameters),
        "gradients": nbytes(parameter.grad for parameter in parameters),
        "optimizer_states": nbytes(filter(torch.is_tensor, states)),
    }


def step(model, optimizer) -> dict[str, int]:
    model.loss(TOKENS).backward()
    optimizer.step()
    return live(model, optimizer)


@pytest.mark.parametrize("precision", ["fp32", "pure-bf16"])
@pytest.mark.parametrize(
    "name, optimizer",
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("sgd-momentum", lambda parameters: torch.optim.SGD(parameters, momentum=0.9)),
    ],
)
def test_one_process(precision, name, optimizer):
    model = build(TINY, dtype=DTYPES[precision])
    ledger = model_states(TINY, Recipe(precision, name), Strategy())
    assert step(model, optimizer(model.parameters())) == ledger.by_category()


def test_autocast_holds_fp32_at_rest():
    model = build(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(TOKENS)
    loss.backward()
    optimizer.step()
    ledger = model_states(TINY, Recipe("amp-bf16"), Strategy())
    assert live(model, optimizer) == ledger.by_category()


def test_frozen_tensors():
    """The fraction of a real choice of tensors: bytes agree, counters as far as a fraction can."""
    model = build(TINY)
    trained = [p for name, p in model.named_parameters() if "lm_head" in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    optimizer = torch.optim.AdamW(trained)
    model.loss(TOKENS).backward()
    optimizer.step()
    share = sum(p.numel() for p in trained) / TINY.parameters
    ledger = model_states(TINY, Recipe("fp32", trainable=share), Strategy())
    assert ledger.gradients == nbytes(p.grad for p in trained)
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    assert sum(x.bytes for x in ledger.lines if "exp_avg" in x.what) == nbytes(moments)


@pytest.fixture
def one_of_many():
    """Rank 0 of a group whose collectives do nothing: its bytes are true, its values are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def join(world_size: int):
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())

    yield join
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4, 7, 64])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "fsdp-bf16"])
def test_fully_shard(one_of_many, world_size, mixed):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    one_of_many(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    )
    model = build(TINY)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    recipe = Recipe("fsdp-bf16" if mixed else "fp32")
    ledger = model_states(TINY, recipe, Strategy("fsdp", world_size))
    measured = step(model, torch.optim.AdamW(model.parameters(), foreach=False))
    assert measured == ledger.by_category()


def test_hybrid_fully_shard(one_of_many):
    from torch.distributed.fsdp import fully_shard

    one_of_many(12)
    mesh = dist.init_device_mesh("cpu", (3, 4), mesh_dim_names=("replicate", "shard"))
    model = build(TINY)
    fully_shard(model, mesh=mesh)
    ledger = model_states(TINY, Recipe("fp32"), Strategy("hsdp", 12, gpus_per_node=4))
    measured = step(model, torch.optim.AdamW(model.parameters(), foreach=False))
    assert measured == ledger.by_category()
