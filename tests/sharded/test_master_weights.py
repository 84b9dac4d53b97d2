"""Mixed precision with master weights, against the same training in fp32 by hand."""

import torch

from course_lib.measure import model_state_bytes
from course_lib.sharded.master_weights import MasterWeights


def test_small_updates_add_up_in_the_master():
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    for _ in range(100):
        weight.grad = torch.tensor([6e-4], dtype=torch.bfloat16)
        optimizer.step()
    # In bf16 alone the weight would still be 1: 6e-4 is far below half the gap to the next number.
    assert abs(weight.item() - 0.94) < 0.005


def test_the_masters_take_the_steps_that_fp32_would():
    torch.manual_seed(0)
    low = torch.nn.Linear(8, 8).to(torch.bfloat16)
    reference = [p.detach().float().requires_grad_() for p in low.parameters()]
    ours = MasterWeights(low.parameters(), torch.optim.AdamW, lr=1e-2)
    theirs = torch.optim.AdamW(reference, lr=1e-2)
    for step in range(5):
        ours.zero_grad()
        low(torch.full((2, 8), step + 1.0, dtype=torch.bfloat16)).float().square().sum().backward()
        for p, r in zip(low.parameters(), reference, strict=True):
            r.grad = p.grad.float()
        ours.step()
        theirs.step()
    for master, r in zip(ours.masters, reference, strict=True):
        torch.testing.assert_close(master, r.detach())


def test_no_fp32_gradient_stays_after_a_step():
    model = torch.nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW)
    model(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert all(master.grad is None for master in optimizer.masters)
    assert model_state_bytes(model, optimizer) == {
        "parameters": 24,
        "gradients": 24,
        "optimizer_states": 12 * 12 + 2 * 4,
    }
