"""Groups of parameters, as torch's optimizers take them, of a model that is to be sharded."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from course_lib.errors import CourseError


def trained_groups(model: nn.Module, groups: Iterable[dict] | None) -> list[dict]:
    """Copies of `groups` whose "params" are lists, without what is frozen; one of all by default.

    Errors: CourseError unless they hold every trained parameter of the model once, in an order.
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
    return groups


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
