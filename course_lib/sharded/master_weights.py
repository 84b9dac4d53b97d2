"""Mixed precision with master weights (Micikevicius et al. 2017; the ZeRO paper's 16 bytes).

The model holds its parameters and gradients in 16 bits. The optimizer holds an fp32 copy of every
parameter, the *master*, and its own states for that copy. At each step:

1. each 16-bit gradient is copied to fp32, as the master's gradient;
2. the optimizer updates the masters;
3. the masters are rounded to 16 bits, back into the model; the fp32 gradients are freed.

An update far smaller than its weight would be rounded away in 16 bits; in the master it adds up.
"""

from collections.abc import Iterable

import torch

from course_lib.sharded.groups import optimizer_states


class MasterWeights:
    """Wraps an optimizer class: `MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)`.

    `optimizer` is the wrapped one; its parameters are the fp32 masters.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], optimizer_class, **options):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().to(torch.float32, copy=True) for p in self.parameters]
        self.optimizer = optimizer_class(self.masters, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters from the model's gradients, and the model from the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> list[torch.Tensor]:
        """Every tensor that the optimizer holds: the masters and the wrapped optimizer's states."""
        return self.masters + optimizer_states(self.optimizer)
