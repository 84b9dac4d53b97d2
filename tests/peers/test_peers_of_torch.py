"""Our DDP and stages train as PyTorch's peers do: 20 losses of each rank, and the parameters.

They mean the same, where not said otherwise:

- The gradient is the mean over ranks and micro-batches. All of PyTorch's average over ranks by
  themselves, as ours do; the loss is divided by the number of micro-batches by the caller.
- DDP and ZeroRedundancyOptimizer add up whole gradients within `no_sync` and reduce them once, as
  ZeRO-1 does. FSDP, as it is here, reduces those of each micro-batch, as ZeRO-2 and ZeRO-3 do.
- Clipping scales by max_norm / (norm + 1e-6), at most by 1, everywhere. Ours multiplies only where
  the norm is above max_norm: between that and 1e-6 less, PyTorch scales by up to 1e-6 more. The
  norm is global: clip_grad_norm_ sees whole gradients with DDP, DTensors with fully_shard, and is a
  method of its own in FSDP1.
- ZeroRedundancyOptimizer gives whole parameters to ranks, and FSDP cuts along the first dimension
  or each unit flat: AdamW goes element by element, so it does not matter who updates what.
- Where and by what the mean is divided differs, and so does the order of sums: rounding.
"""

import pytest
import torch
from contestants import OURS, TORCH
from peer_cases import RTOL, check_equal, train_all

PEERS = {name: make for of_stage in TORCH.values() for name, make in of_stage.items()}


@pytest.mark.parametrize("job, world_size", [("AdamW", 2), ("accumulation, clipping", 4)])
def test_losses_and_parameters_are_those_of_pytorch_peers(job, world_size):
    check_equal(train_all(OURS | PEERS, [job], world_size), OURS, PEERS)


def test_a_step_of_ours_that_lacks_clipping_would_be_seen():
    jobs = ["accumulation", "accumulation, clipping"]
    results = train_all({"ZeRO1": OURS["ZeRO1"]}, jobs, world_size=2)
    (_, free), (_, clipped) = (results[job, "ZeRO1"][0] for job in jobs)
    assert all((free[name] - clipped[name]).abs().max() > 10 * RTOL for name in free)
    assert torch.equal(clipped["lm_head.weight"], results[jobs[1], "ZeRO1"][1][1]["lm_head.weight"])
