"""How 07-tied's answers are run: modules made from names, and units given back as names.

It stands apart from the answers: whatever stands beside a reference is off limits for a learner's
answer, and so must not be called while one runs.
"""

import torch
from torch import nn

from course_lib.checks.exercise import Answer, Case


def named_units(answer: Answer, case: Case) -> object:
    """The case has each module's parameters by name; so has what comes back, sorted."""
    (described,) = case.args
    made: dict[str, nn.Parameter] = {}
    modules = []
    for names in described:
        children = [nn.Module() for _ in names]
        for child, name in zip(children, names, strict=True):
            parameter = made.setdefault(name, nn.Parameter(torch.zeros(1 + len(made) % 3)))
            child.register_parameter("weight", parameter)
        modules.append(nn.ModuleList(children))
    found = answer(modules)
    if not isinstance(found, (list, tuple)):
        return found if found is None else f"{found!r:.80}"
    if not all(isinstance(unit, (list, tuple, set, dict)) for unit in found):
        return f"units that are no lists of parameters: {found!r:.80}"
    names = {parameter: name for name, parameter in made.items()}
    return sorted(sorted(names.get(p, f"{p!r:.40}") for p in unit) for unit in found)
