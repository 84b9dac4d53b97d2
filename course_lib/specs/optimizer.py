"""The optimizers: how many moments each keeps for a parameter, and what else.

A moment has the dtype of what the optimizer updates, the master copy where there is one and the
parameters where there is none: `torch.zeros_like` in PyTorch's optimizers. AdamW with bf16 states
(`adamw-bf16`, as in torchao) overrides that.

PyTorch's AdamW also keeps, for every tensor that it updates, a counter `step`: one fp32 scalar, 4
bytes. They weigh nothing, but receipts balance to the byte. On CUDA the counters of an optimizer
that is neither fused nor capturable live in the host's memory; those of a fused one on the GPU.
"""

from dataclasses import dataclass

STEP_COUNTER_BYTES = 4


@dataclass(frozen=True)
class Optimizer:
    """`moments` names the states of one element per parameter, as PyTorch does.

    `dtype` is theirs where the optimizer decides it, None where it follows what is updated.
    """

    name: str
    moments: tuple[str, ...] = ()
    dtype: str | None = None
    counts_steps: bool = False


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", ("exp_avg", "exp_avg_sq"), counts_steps=True),
        Optimizer("adamw-bf16", ("exp_avg", "exp_avg_sq"), dtype="bf16", counts_steps=True),
        Optimizer("sgd"),
        Optimizer("sgd-momentum", ("momentum_buffer",)),
    )
}
