"""Which modules are FSDP's units: what is gathered, computed in and freed at a time.

A policy gives modules; by hand, give a list of them. A parameter belongs to the innermost unit that
has it, and what is left is the root unit's. Too coarse, and much is whole at once; too fine, and
communication falls into crumbs, each with its own latency.
"""

from collections.abc import Sequence

from torch import nn

from course_lib.errors import CourseError
from course_lib.sharded.fsdp_parameter import Place
from course_lib.specs.checking import whole

NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
BY_PARTS = (nn.MultiheadAttention,)  # whose parameters are used without a call


def by_class(model: nn.Module, *classes: type[nn.Module]) -> list[nn.Module]:
    """Every module of these classes, as `ModuleWrapPolicy` in PyTorch."""
    return [module for module in model.modules() if isinstance(module, classes)]


def by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules that have `least` parameters or more, besides those of smaller units.

    Bottom up, as `size_based_auto_wrap_policy` in PyTorch. ModuleLists are no units, as they are
    not called, nor is an nn.MultiheadAttention, or what it has. What is too small is left to the
    module around it, in the end to the root.
    """
    whole("least", least)
    chosen: list[nn.Module] = []
    seen: set[nn.Parameter] = set()

    def left(module: nn.Module) -> int:
        by_parts = isinstance(module, BY_PARTS)
        own = [p for p in module.parameters(recurse=by_parts) if p not in seen]
        seen.update(own)
        rest = sum(p.numel() for p in own) + sum(left(child) for child in module.children())
        if rest < least or module is model or by_parts or isinstance(module, NOT_CALLED):
            return rest
        chosen.append(module)
        return 0

    left(model)
    return chosen


def blocks(model: nn.Module) -> list[nn.Module]:
    """The children of every ModuleList that is not inside of another's."""
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
                found.append(child)
            else:
                search(child)

    search(model)
    return found


def assign(
    model: nn.Module, chosen: Sequence[nn.Module]
) -> dict[nn.Module, dict[nn.Parameter, list[Place]]]:
    """The parameters of each unit, in the order of modules, with the places where each is.

    The root, `model`, comes first, also where nothing is left to it; of the others those that have
    parameters. Errors: CourseError where a module is not the model's, or cannot be called, and
    where two units share a parameter.
    """
    names = {module: name for name, module in model.named_modules()}
    for module in chosen:
        if module not in names or isinstance(module, NOT_CALLED):
            raise CourseError(
                f"FSDP was given a {type(module).__name__} as a unit, and gathers a unit when its "
                "forward is called: give modules out of model.modules() that are called."
            )
    units: dict[nn.Module, dict[nn.Parameter, list[Place]]] = {model: {}}
    owner: dict[nn.Parameter, nn.Module] = {}

    def visit(module: nn.Module, unit: nn.Module) -> None:
        unit = module if module in chosen else unit
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            first = owner.setdefault(parameter, unit)
            if first is not unit:
                both = " and ".join(repr(names[x] or "the root") for x in (first, unit))
                raise CourseError(
                    f"The units {both} share a parameter ({name!r}), and each would gather, free "
                    "and reduce it by itself: make one unit of both, or leave both to the root."
                )
            units.setdefault(unit, {}).setdefault(parameter, []).append((module, name))
        for child in module.children():
            visit(child, unit)

    visit(model, model)
    return units
