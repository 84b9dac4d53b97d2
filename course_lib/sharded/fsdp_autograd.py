"""What FSDP asks of autograd: when backward comes to a module's call, and is through with it."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class Through(torch.autograd.Function):
    """Passes tensors on, and calls `after()` when backward has the gradients of all of them.

    What comes out are views, which PyTorch lets no one write to in place.
    """

    @staticmethod
    def forward(ctx, after: Callable, *tensors: torch.Tensor):
        ctx.after = after
        ctx.set_materialize_grads(False)  # of what is not used there is no gradient
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.after()
        return None, *gradients


def watched(after: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The inputs of a call, such that `after()` is called when backward is through with it.

    They are looked for among the arguments, and in tuples. Lists and dicts stay the caller's own,
    as the call may fill them.
    """
    inputs: list[torch.Tensor] = []
    args, kwargs = _over_inputs(lambda x: inputs.append(x) or x, args, kwargs)
    if not inputs or not torch.is_grad_enabled():
        return args, kwargs
    outputs = iter(Through.apply(after, *inputs))
    return _over_inputs(lambda _: next(outputs), args, kwargs)


def _over_inputs(function: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return _over(function, args), {name: _over(function, x) for name, x in kwargs.items()}


def _over(function: Callable, value):
    # No function within a function that calls itself: that is a cycle, which holds its inputs.
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad else value
    return tuple([_over(function, x) for x in value]) if type(value) is tuple else value


def tensors(tree) -> Iterator[torch.Tensor]:
    """All of them, in containers and dataclasses."""
    for x in tree_leaves(tree):
        if isinstance(x, torch.Tensor):
            yield x
        elif is_dataclass(x):
            yield from tensors(dict(vars(x)))


def cast(tree, dtype: torch.dtype | None):
    """The same with all floating-point tensors in `dtype`. A part with none to cast stays itself,
    as whoever gets it may fill it."""
    if dtype is None:
        return tree
    if type(tree) is tuple:
        return tuple([cast(x, dtype) for x in tree])
    leaves, spec = tree_flatten(tree)
    made = [x.to(dtype) if _is_floating(x) else x for x in leaves]
    changed = any(a is not b for a, b in zip(leaves, made, strict=True))
    return tree_unflatten(made, spec) if changed else tree


def in_backward() -> bool:
    """Does autograd run backward at this moment, on this thread?"""
    return torch._C._current_graph_task_id() != -1


def _is_floating(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()
