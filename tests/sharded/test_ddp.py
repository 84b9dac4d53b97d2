"""Our DDP against PyTorch's, and against one process that takes the whole batch.

Each rank begins with weights of its own and trains on its own part of the batch, under both
wrappers in turn. Losses, parameters, buffers and the collectives of a steady step must agree.
"""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import comm, models, ranks, specs
from course_lib.errors import CourseError
from course_lib.measure import storage_bytes
from course_lib.sharded.ddp import DDP

STEPS = 20
STEADY = 15  # from this step on, collectives are compared
VOCAB = 61
BUCKET = 4_000  # bytes: several buckets, and tensors that are larger than one
LLAMA = specs.read_config(
    {
        "model_type": "llama",
        "hidden_size": 18,
        "intermediate_size": 35,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
    }
)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)  # eps: noise in tiny gradients stays noise


def llama(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return models.build(LLAMA, dtype=dtype, seed=seed)


def frozen_and_tied(seed: int) -> nn.Module:
    model = models.build(replace(LLAMA, tied_embeddings=True), seed=seed)
    model.model.layers[0].self_attn.requires_grad_(False)
    return model


def seeded(build):
    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build()

    return built


@seeded
def batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(16)
    norm.running_mean.normal_()
    return nn.Sequential(
        nn.Embedding(VOCAB, 16), nn.Flatten(0, 1), nn.Linear(16, 16), norm, nn.Linear(16, VOCAB)
    )


@seeded
def two_dtypes() -> nn.Module:
    low = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 32)).bfloat16()
    low.register_forward_hook(lambda module, args, out: out.float())
    return nn.Sequential(low, nn.Linear(32, VOCAB))


@seeded
def megabytes() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 600), nn.Linear(600, 600), nn.Linear(600, VOCAB))


def ours(module: nn.Module, cap: int | None) -> nn.Module:
    return DDP(module, **({"bucket_bytes": cap} if cap else {}))


def theirs(module: nn.Module, cap: int | None) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=cap and cap / 2**20)


def tokens(step: int, rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    return torch.randint(VOCAB, (2, 9), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1]).float()
    return F.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].flatten())


def step(model: nn.Module, optimizer, batches: list[torch.Tensor]) -> float:
    """One optimizer step on some micro-batches: their mean loss."""
    losses = []
    for batch in batches:
        last = batch is batches[-1]
        with contextlib.nullcontext() if last else model.no_sync():
            losses.append(loss_of(model, batch) / len(batches))
            losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum(loss.item() for loss in losses)


def train(wrap, build, optimizer_class, micro_batches: int, cap: int | None):
    """On each rank: losses, state dict, and the collectives of the last steps."""
    rank = dist.get_rank()
    model = wrap(build(rank), cap)
    optimizer = optimizer_class(trained(model))
    losses, steady = [], 0
    for n in range(STEPS):
        if n == STEADY:
            steady = len(ranks.entries())
        losses.append(step(model, optimizer, [tokens(n, rank, m) for m in range(micro_batches)]))
    issued = [(e.kind, e.elements, e.dtype, e.ranks) for e in ranks.entries()[steady:]]
    return losses, model.module.state_dict(), issued


def in_one_process(build, optimizer_class, micro_batches: int, world_size: int):
    """Losses and state dict of rank 0's model, trained on the parts of all ranks at once."""
    model = build(0)
    optimizer = optimizer_class(trained(model))
    losses = []
    for n in range(STEPS):
        parts = [tokens(n, r, m) for r in range(world_size) for m in range(micro_batches)]
        losses.append(step(model, optimizer, [torch.cat(parts)]))
    return losses, model.state_dict()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


LOW = ("16 bits", "two dtypes")
CASES = {  # build, optimizer, micro-batches, bucket bytes
    "fp32": (llama, ADAMW, 1, BUCKET),
    "accumulation": (llama, MOMENTUM, 2, BUCKET),
    "16 bits": (partial(llama, dtype=torch.bfloat16), MOMENTUM, 1, BUCKET),
    "frozen and tied": (frozen_and_tied, ADAMW, 1, BUCKET),
    "buffers": (batch_norm, MOMENTUM, 1, BUCKET),
    "two dtypes": (two_dtypes, MOMENTUM, 2, BUCKET),
    "default caps": (megabytes, MOMENTUM, 1, None),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from two threads, and lose much where others are at work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trains_as_pytorch_and_as_one_process(world_size):
    def all_cases():
        torch.set_num_threads(1)
        return {name: [train(w, *case) for w in (ours, theirs)] for name, case in CASES.items()}

    results = ranks.run(all_cases, world_size=world_size)
    for name, case in CASES.items():
        for (losses, state, issued), (expected, their_state, theirs_issued) in (
            result[name] for result in results
        ):
            close(losses, expected, name, rtol=1e-3 if name in LOW else 1e-5)
            close(state, their_state, name, rtol=2e-2 if name in LOW else 1e-5)
            if name == "two dtypes":  # in theirs the last of each dtype come in no known order
                issued, theirs_issued = sorted(issued), sorted(theirs_issued)
            assert issued and issued == theirs_issued, name
        if name not in (*LOW, "buffers"):  # BatchNorm's statistics are those of each rank's part
            expected, whole_state = in_one_process(*case[:3], world_size)
            losses = [result[name][0][0] for result in results]
            close(torch.tensor(losses).mean(0), torch.tensor(expected), name, rtol=1e-5)
            for result in results:
                close(result[name][0][1], whole_state, name, rtol=1e-4)


def close(actual, expected, name: str, rtol: float) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol / 10, msg=lambda message: f"{name}: {message}"
    )


def test_collectives_of_a_step_are_those_of_the_ledger():
    def fn():
        model = DDP(llama(0), BUCKET)
        for n in range(3):
            before = len(ranks.entries())
            loss_of(model, tokens(n, dist.get_rank(), 0)).backward()
        return before

    results = ranks.run(fn, world_size=4)
    plan = comm.step(LLAMA, specs.Recipe("fp32"), specs.Strategy("ddp", 4), bucket_bytes=BUCKET)
    step = results.log[0][results[0] :]
    assert {"all_reduce": len(step)} == plan.counts()
    assert {"all_reduce": sum(e.bytes_per_rank for e in step)} == plan.bytes_by_kind()


def test_all_reduces_start_while_backward_goes_on():
    def fn():
        model = DDP(llama(0), BUCKET)
        last = model.module.model.embed_tokens.weight  # the last to get its gradient
        issued = []
        last.register_hook(lambda gradient: issued.append(len(ranks.entries())))
        for n in range(2):
            before = len(ranks.entries())
            loss_of(model, tokens(n, dist.get_rank(), 0)).backward()
            kinds = [entry.kind for entry in ranks.entries()[before : issued[-1]]]
            assert kinds.count("all_reduce") == len(model.buckets) - 1 > 2
        return True

    assert all(ranks.run(fn, world_size=2))


def test_no_sync_sends_nothing_and_gradients_take_no_more_than_the_buckets():
    def fn():
        model = DDP(llama(0), BUCKET)
        held = []
        for n in range(3):
            before = len(ranks.entries())
            with model.no_sync():
                for m in range(2):
                    loss_of(model, tokens(n, dist.get_rank(), m)).backward()
            assert len(ranks.entries()) == before
            gradients = [p.grad for p in model.parameters()]
            held.append(storage_bytes([*gradients, *(bucket.flat for bucket in model.buckets)]))
            loss_of(model, tokens(n, dist.get_rank(), 2)).backward()
            model.zero_grad(set_to_none=n == 0)
        return held

    assert ranks.run(fn, world_size=2)[0] == [4 * LLAMA.parameters] * 3


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, order: tuple[str, ...] = ("first", "second")):
        heads = {"first": self.first, "second": self.second}
        return sum(heads[name](x).square().sum() for name in order)


@pytest.mark.parametrize("forgetful", [(1,), (0, 1, 2)], ids=["one rank", "all ranks"])
def test_parameters_without_a_gradient_are_named_and_nobody_hangs(forgetful):
    def fn():
        model = DDP(TwoHeads(), 1)
        model(torch.ones(4)).backward()
        heads = ("first",) if dist.get_rank() in forgetful else ("first", "second")
        model(torch.ones(4), heads).backward()

    with pytest.raises(ranks.RankError, match="second.weight, second.bias") as caught:
        ranks.run(fn, world_size=3, timeout=30)
    assert not isinstance(caught.value, ranks.RankTimeout)
    assert isinstance(caught.value.__cause__, CourseError)
    blamed = "rank 1" if len(forgetful) == 1 else "ranks 0-2"
    assert str(caught.value).startswith(f"{blamed} raised CourseError: Backward gave no gradient")


def test_ranks_whose_backward_goes_in_another_order_send_the_same():
    def fn():
        rank = dist.get_rank()
        model = DDP(TwoHeads(), 1)
        order = ("first", "second") if rank else ("second", "first")
        for _ in range(3):
            model.zero_grad()
            model(torch.full((4,), rank + 1.0), order).backward()
        mean = [parameter.grad for parameter in model.parameters()]
        losses = [model.module(torch.full((4,), x)) for x in (1.0, 2.0)]
        return mean, torch.autograd.grad(sum(losses) / 2, list(model.parameters()))

    for mean, expected in ranks.run(fn, world_size=2):
        torch.testing.assert_close(mean, list(expected))


def test_a_group_of_some_ranks_averages_among_them():
    def fn():
        pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
        rank = dist.get_rank()
        torch.manual_seed(rank)
        model = DDP(nn.Linear(1, 1), process_group=pairs[rank // 2])
        model(torch.full((1, 1), float(rank))).sum().backward()
        return float(model.module.weight), float(model.module.weight.grad)

    weights, gradients = zip(*ranks.run(fn, world_size=4), strict=True)
    assert gradients == (0.5, 0.5, 2.5, 2.5)
    assert weights[0] == weights[1] != weights[2] == weights[3]


def test_after_a_backward_that_broke_off_nothing_goes_on_as_if_it_had_not():
    def fn(through_forward):
        model = DDP(TwoHeads(), 1)
        late = model.module.first.weight
        handle = late.register_hook(lambda gradient: 1 / 0)
        loss = model(torch.ones(4))
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        handle.remove()
        with pytest.raises(CourseError, match="broke off"):
            model(torch.ones(4)) if through_forward else loss.backward()

    for through_forward in (True, False):
        ranks.run(fn, world_size=1, args=(through_forward,))


def test_the_forward_decides_whether_its_backward_synchronises():
    def fn(inside):
        model = DDP(nn.Linear(2, 1), 1)
        loss = None
        with model.no_sync() if inside else contextlib.nullcontext():
            loss = model(torch.ones(1, 2)).sum()
        before = len(ranks.entries())
        with contextlib.nullcontext() if inside else model.no_sync():
            loss.backward()
        return len(ranks.entries()) - before

    assert ranks.run(fn, world_size=2, args=(True,)) == [0, 0]
    assert ranks.run(fn, world_size=2, args=(False,)) == [2, 2]


def test_a_module_with_nothing_to_train_is_refused():
    with pytest.raises(ranks.RankError, match="CourseError: .* no parameter requires a gradient"):
        ranks.run(lambda: DDP(nn.ReLU()), world_size=1)
