"""Our DDP and stages train as DeepSpeed's stages 0 to 3 do: 20 losses, and the parameters.

Needs the extra `peers` and a C++ compiler: DeepSpeed compiles an operator at its first use. A run
that is ended while it compiles leaves a file `lock` in ~/.cache/torch_extensions, for which the
next one waits until it is removed.

What DeepSpeed does in its own way:

- Its engine divides the loss by the number of micro-batches by itself, in backward; the loss that
  forward returns is not divided, nor is it with ours.
- `step` is called after each micro-batch, and updates after the last. Stage 1 and 2 all-reduce on
  the CPU, and keep of it what they would have kept of a reduce_scatter.
- Stages 1 to 3 clip by dividing by (norm + 1e-6) / max_norm where that is above 1, which is the
  same factor as ours; stage 0 clips as PyTorch does.
- Stage 3 keeps parameters of fewer than 100,000 elements whole, which all of this model's are. It
  comes a second time, told to shard them all.
- It has an AdamW of its own in C++, and uses PyTorch's where told to (torch_adam).
"""

import pytest
from contestants import DEEPSPEED, OURS
from peer_cases import JOBS, check_equal, train_all

pytest.importorskip("deepspeed", reason="pip install -e '.[peers]' brings it")

PEERS = {name: make for of_stage in DEEPSPEED.values() for name, make in of_stage.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_and_parameters_are_those_of_deepspeed(world_size):
    check_equal(train_all(OURS | PEERS, list(JOBS), world_size, timeout=1500), OURS, PEERS)
