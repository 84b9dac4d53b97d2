"""Live bytes by storage, and receipts that show their difference."""

import pytest
import torch

from course_lib.measure import model_state_bytes, receipt, storage_bytes


def test_views_of_one_storage_count_once_and_whole():
    flat = torch.zeros(10)
    assert storage_bytes([flat[:4], flat[4:]]) == 40


def test_tied_weights_count_once():
    a, b = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    assert storage_bytes([a.weight, b.weight]) == 64


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (lambda p: torch.optim.AdamW(p), 2 * 48 + 2 * 4),  # m and v, and a counter per tensor
        (lambda p: torch.optim.SGD(p, momentum=0.9), 48),
        (lambda p: torch.optim.SGD(p), 0),
    ],
)
def test_model_states_of_torchs_own_optimizers(optimizer, states):
    model = torch.nn.Linear(3, 3)  # 12 parameters, 2 tensors
    optimizer = optimizer(model.parameters())
    assert model_state_bytes(model, optimizer)["gradients"] == 0
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert model_state_bytes(model, optimizer) == {
        "parameters": 48,
        "gradients": 48,
        "optimizer_states": states,
    }


def test_what_a_sharded_optimizer_keeps_counts_with_the_models_own():
    class Sharded:
        def __init__(self, model):
            self.model = model

        def parameter_tensors(self):
            return [torch.zeros(5), self.model.weight.detach()]  # which is there already

        def gradient_tensors(self):
            return [torch.zeros(7)]

        def state_tensors(self):
            return [torch.zeros(2)]

    model = torch.nn.Linear(3, 3)
    model(torch.ones(3)).sum().backward()
    assert model_state_bytes(model, Sharded(model)) == {
        "parameters": 48 + 20,
        "gradients": 48 + 28,
        "optimizer_states": 8,
    }


def test_a_receipt_balances_or_says_what_is_off():
    good = receipt("toy", {"a": 10}, {"a": 10})
    assert good.balances and "difference 0" in repr(good)
    bad = receipt("toy", {"a": 10, "b": 1}, {"a": 14})
    assert not bad.balances
    assert "a is off by +4 bytes" in repr(bad) and "+4" in bad._repr_html_()
    assert [line.difference for line in bad.lines] == [4, -1]
