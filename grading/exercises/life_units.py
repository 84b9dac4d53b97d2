"""Lesson 08, 08-units: whose is each parameter? The innermost unit's, or else the root's."""

from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded import wrapping
from grading.exercises import life_running


def assign(model, chosen):
    units, owner = {model: set()}, {}

    def visit(module, unit):
        unit = module if module in chosen else unit
        for p in module.parameters(recurse=False):
            if owner.setdefault(p, unit) is not unit:
                raise ValueError("two units share a parameter")
            units.setdefault(unit, set()).add(p)
        for child in module.children():
            visit(child, unit)

    visit(model, model)
    return units


def _by_names(model, chosen):
    """A different way to the same: the unit whose name is the longest beginning of its name."""
    names = {"": model} | {name: module for name, module in model.named_modules()}
    names = {name: module for name, module in names.items() if not name or module in chosen}
    units = {module: [] for module in names.values()}
    for path, p in model.named_parameters(remove_duplicate=False):
        within = [name for name in names if not name or path.startswith(name + ".")]
        units[names[max(within, key=len)]].append(p)
    units = {unit: list(dict.fromkeys(found)) for unit, found in units.items()}
    every = [p for found in units.values() for p in found]
    if len(every) != len(set(every)):
        raise ValueError("shared")
    return units


def _all_that_are_inside(model, chosen):
    units = {module: set(module.parameters()) for module in chosen}
    inside = set().union(*units.values())
    return {model: set(model.parameters()) - inside} | units


def _no_root(model, chosen):
    units = assign(model, chosen)
    del units[model]
    return units


def _root_has_all(model, chosen):
    return assign(model, chosen) | {model: set(model.parameters())}


def _first_has_it(model, chosen):
    taken, units = set(), {}
    for module in [*reversed(list(model.modules()))]:
        if module in chosen or module is model:
            units[module] = set(module.parameters()) - taken
            taken |= units[module]
    return units


def _outermost(model, chosen):
    units, taken = {}, set()
    for module in model.modules():
        if module in chosen:
            units[module] = set(module.parameters()) - taken
            taken |= units[module]
    return {model: set(model.parameters()) - taken} | units


def _merged(model, chosen):
    try:
        return assign(model, chosen)
    except ValueError:
        return {model: set(model.parameters())}


def _always_refuses(model, chosen):
    seen = set()
    for module in model.modules():
        own = {p for p in module.parameters(recurse=False)}
        if own & seen:
            raise ValueError
        seen |= own
    return assign(model, chosen)


def _case(name: str, blocks: int, chosen: list[str], *tied: tuple[str, str]) -> Case:
    ties = "".join(f"; {one} and {other} share their weight" for one, other in tied)
    given = f"a model with embed, {blocks} blocks (attention, mlp) and head; chosen: "
    args = blocks, chosen, [list(pair) for pair in tied]
    return Case(name, args, given=given + ", ".join(chosen) + ties)


_NO_ROOT = (
    "You leave out the root unit. What is in no chosen module (embedding, head) must be "
    "sharded and gathered, too: it belongs to the root, which is the model itself."
)

UNITS = Exercise(
    id="08-units",
    title="Whose parameter is it?",
    task="Return {unit: its parameters}, the root among the units; raise ValueError where two "
    "units share a parameter.",
    points={"all": 3},
    reference=assign,
    library=(wrapping.assign,),
    alternatives=(_by_names,),
    cases=(
        _case("blocks", 2, ["blocks.0", "blocks.1"]),
        _case("a unit in a unit", 2, ["blocks.0", "blocks.0.mlp"]),
        _case("tied within the root", 1, ["blocks.0"], ("embed", "head")),
        _case("tied within a unit", 1, ["blocks.0"], ("blocks.0.attention", "blocks.0.mlp")),
        _case("tied across", 2, ["blocks.0", "blocks.1"], ("blocks.0.mlp", "blocks.1.mlp")),
        _case("tied to the root", 2, ["blocks.0"], ("blocks.0.mlp", "blocks.1.mlp")),
    ),
    fresh=lambda rng: [
        _case(
            "a few of six",
            6,
            [f"blocks.{i}" for i in sorted(rng.sample(range(6), 3))] + ["blocks.2.mlp"],
        )
    ],
    run=life_running.named,
    nudge="Walk down the modules, and take along the unit that you are in: a chosen module is a "
    "new one. Note each parameter's owner; when it is met again under another one, raise.",
    misconceptions=(
        Misconception(
            "root unit forgotten",
            _no_root,
            _NO_ROOT,
            "Begin with {model: …}.",
        ),
        Misconception(
            "root unit forgotten, and what is shared is in both",
            lambda model, chosen: {module: set(module.parameters()) for module in chosen},
            _NO_ROOT,
            "Begin with {model: …}.",
        ),
        Misconception(
            "the root has all",
            _root_has_all,
            "Your root has every parameter, also those of other units: then all of the model is "
            "whole from the beginning of forward. The root has what is left.",
        ),
        Misconception(
            "tied weights split",
            _all_that_are_inside,
            "Your units overlap: a tied weight, or one that is in a unit within a unit, is in "
            "both. It would have two shards, updated apart. A parameter is the innermost unit's; "
            "and where two units share one, refuse.",
        ),
        Misconception(
            "the last one has it",
            _first_has_it,
            "Where two units share a parameter, you give it to one of them: when the other one "
            "computes, its weight belongs to a unit that was freed. Raise ValueError.",
        ),
        Misconception(
            "the outermost has it",
            _outermost,
            "You give a parameter to the first chosen module that has it, from outside. A unit "
            "within a unit keeps its own: the innermost one has it.",
        ),
        Misconception(
            "all in one",
            _merged,
            "Where two units share a parameter you put all into the root: right, and the whole "
            "model is gathered at once, unasked. Say so instead: raise ValueError.",
        ),
        Misconception(
            "any tie refused",
            _always_refuses,
            "You refuse every tied weight. Within one unit it does no harm: it is gathered and "
            "freed once, whole from its first use to its last.",
        ),
    ),
)
