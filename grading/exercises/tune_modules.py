"""How 09-wrap's answers are run: a model made from a description, and units given back as names.

A description is nested: a number is a module with so many parameters, a dict a module with the
children that it names (and under "own" parameters of its own), a list a ModuleList.

It stands apart from the answers: whatever stands beside a reference is off limits for a learner's
answer, and so must not be called while one runs.
"""

import torch
from torch import nn

from course_lib.checks.exercise import Answer, Case


def named_units(answer: Answer, case: Case) -> object:
    """The names of the units that the answer chose, sorted."""
    described, least = case.args
    model = _made(described)
    found = answer(model, least)
    if not isinstance(found, (list, tuple)):
        return found if found is None else f"{type(found).__name__} in place of a list"
    names = {module: name or "the model" for name, module in model.named_modules()}
    return sorted(
        names.get(x, "another module") if isinstance(x, nn.Module) else f"a {type(x).__name__}"
        for x in found
    )


def _made(described) -> nn.Module:
    if isinstance(described, list):
        return nn.ModuleList(_made(each) for each in described)
    module = nn.Module()
    children = {} if isinstance(described, int) else dict(described)
    own = described if isinstance(described, int) else children.pop("own", 0)
    if own:
        module.weight = nn.Parameter(torch.zeros(own))
    for name, each in children.items():
        module.add_module(name, _made(each))
    return module
