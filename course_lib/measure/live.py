"""Live bytes of a training job's model states, read from the tensors' storages themselves.

A storage is the block of memory behind a tensor. Two tensors can share one (tied weights, views
of a flat buffer), so bytes are counted by storage, each once, whole.
"""

from collections.abc import Iterable

import torch


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def model_state_bytes(model: torch.nn.Module, optimizer) -> dict[str, int]:
    """Live bytes of parameters, gradients and optimizer states.

    `optimizer` is a torch optimizer, or anything with a `state_tensors()` that lists what it holds,
    and a `parameter_tensors()` and `gradient_tensors()` where it keeps some besides the model's
    own. Gradients are counted as they are now: after backward, before they are set to None.
    """
    return {
        "parameters": storage_bytes(parameter_tensors(model, optimizer)),
        "gradients": storage_bytes(gradient_tensors(model, optimizer)),
        "optimizer_states": storage_bytes(state_tensors(optimizer)),
    }


def parameter_tensors(model: torch.nn.Module, optimizer) -> list[torch.Tensor]:
    """The model's parameters as they are now, and what `optimizer` lists as its own."""
    return [*model.parameters(), *kept(optimizer, "parameter_tensors")]


def gradient_tensors(model: torch.nn.Module, optimizer) -> list[torch.Tensor]:
    """The model's gradients as they are now, and what `optimizer` lists as its own."""
    own = [p.grad for p in model.parameters() if p.grad is not None]
    return [*own, *kept(optimizer, "gradient_tensors")]


def kept(optimizer, listed_by: str) -> list[torch.Tensor]:
    """What `optimizer` lists as its own."""
    return getattr(optimizer, listed_by)() if hasattr(optimizer, listed_by) else []


def state_tensors(optimizer) -> list[torch.Tensor]:
    """Every tensor that an optimizer holds, step counters included."""
    if hasattr(optimizer, "state_tensors"):
        return optimizer.state_tensors()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor)]
