"""DeepSpeed's collectives are in the log too. Needs the extra `peers` and a C++ compiler."""

import os

import pytest
import torch
from torch import nn

from course_lib import ranks

pytest.importorskip("deepspeed", reason="pip install -e '.[peers]' brings it")

WEIGHTS = 16 * 16 + 16 * 4


def one_step(stage: int) -> list[tuple[str, int]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    before = len(ranks.entries())
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
    return [(entry.kind, entry.elements) for entry in ranks.entries()[before:]]


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_all_reduce_gradients_and_gather_parameters(stage):
    # On the CPU it all-reduces even where a reduce-scatter would do; the one element says
    # whether any rank saw an infinite gradient.
    expected = [("all_reduce", WEIGHTS), ("all_reduce", 1), ("all_gather", WEIGHTS)]
    assert ranks.run(one_step, world_size=2, args=(stage,), timeout=300) == [expected] * 2


def test_stage_3_gathers_each_weight_and_scatters_gradients():
    for entries in ranks.run(one_step, world_size=2, args=(3,), timeout=300):
        assert ("all_gather", 16 * 16) in entries and ("reduce_scatter", WEIGHTS) in entries
