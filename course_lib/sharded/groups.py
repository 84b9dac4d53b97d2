"""What the stages ask of a model and of torch's optimizers, before and after they shard."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from course_lib.errors import CourseError


def trained_groups(model: nn.Module, groups: Iterable[dict] | None) -> list[dict]:
    """Copies of `groups` whose "params" are lists, without what is frozen; one of all by default.

    Errors: CourseError unless they hold every trained parameter of the model once, in an order,
    and all of one dtype.
    """
    groups = list(groups or [{"params": model.parameters()}])
    for group in groups:
        if not isinstance(group, dict) or isinstance(group.get("params"), set | None):
            raise CourseError(
                f"The groups hold a {type(group).__name__}, and are expected to be dicts whose "
                '"params" is a list: all ranks need the same parameters in the same order.'
            )
    groups = [dict(group) for group in groups]
    for group in groups:
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else params
        group["params"] = [p for p in params if p.requires_grad]
    _check_all_once([group["params"] for group in groups], model)
    common_dtype(p for group in groups for p in group["params"])
    return groups


def common_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """Errors: CourseError where there is none, or more than one."""
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1:
        given = ", ".join(sorted(map(str, dtypes))) or "no trained parameter at all"
        raise CourseError(
            f"ZeRO was given {given}, and expects parameters of one dtype, which travel together: "
            "cast the model."
        )
    return dtypes.pop()


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor that it keeps for what it updates, step counters included."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor)]


def _check_all_once(groups: list[list[nn.Parameter]], model: nn.Module) -> None:
    count = Counter(p for group in groups for p in group)
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    wrong = [f"{name} {count[p]} times" for p, name in trained.items() if count[p] != 1]
    foreign = len(count.keys() - trained.keys())
    if foreign:
        wrong.append(f"{foreign} parameters that are not the model's")
    if wrong:
        raise CourseError(
            f"The groups hold {', '.join(wrong)}, and are expected to hold each trained parameter "
            "of the model once: add what is left out, or freeze it."
        )
