"""Lesson 07, 07-tied: modules that share a parameter are one unit."""

from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded import unit as library
from grading.exercises import zero3_units


def units_of(modules):
    units = []
    for module in modules:
        unit = dict.fromkeys(module.parameters())  # a set that keeps its order
        for other in [each for each in units if each.keys() & unit.keys()]:
            units.remove(other)
            unit = other | unit
        units.append(unit)
    return [list(unit) for unit in units]


def _by_merging(modules):
    """A different way to the same: sets, merged until no two of them meet."""
    units = [set(module.parameters()) for module in modules]
    merged = True
    while merged:
        merged = False
        for i, unit in enumerate(units):
            for j in range(len(units) - 1, i, -1):
                if unit & units[j]:
                    unit |= units.pop(j)
                    merged = True
    return units


def _each_its_own(modules):
    return [list(module.parameters()) for module in modules]


def _first_comes(modules):
    taken, units = set(), []
    for module in modules:
        unit = [p for p in module.parameters() if p not in taken]
        taken |= set(unit)
        if unit:
            units.append(unit)
    return units


def _last_comes(modules):
    return _first_comes(list(reversed(modules)))


def _first_match(modules):
    units = []
    for module in modules:
        unit = dict.fromkeys(module.parameters())
        for other in units:
            if other.keys() & unit.keys():
                other.update(unit)
                break
        else:
            units.append(unit)
    return [list(unit) for unit in units]


def _neighbours(modules):
    units = []
    for module in modules:
        unit = dict.fromkeys(module.parameters())
        if units and units[-1].keys() & unit.keys():
            units[-1].update(unit)
        else:
            units.append(unit)
    return [list(unit) for unit in units]


def _skipped(modules):
    taken, units = set(), []
    for module in modules:
        unit = set(module.parameters())
        if not unit & taken:
            units.append(unit)
            taken |= unit
    return units


def _shared_apart(modules):
    seen, shared = set(), set()
    for module in modules:
        shared |= seen & set(module.parameters())
        seen |= set(module.parameters())
    units = [set(module.parameters()) - shared for module in modules]
    return [unit for unit in units if unit] + [{p} for p in shared]


def _twice_in_one(modules):
    units = []
    for module in modules:
        unit = [p for m in module.modules() for p in m.parameters(recurse=False)]
        for other in [each for each in units if set(each) & set(unit)]:
            units = [each for each in units if each is not other]
            unit = other + unit
        units.append(unit)
    return units


def _by_value(modules):
    units = []
    for module in modules:
        unit = list(module.parameters())
        for other in list(units):
            if any(p in other for p in unit):
                units.remove(other)
                unit = other + [p for p in unit if p not in other]
        units.append(unit)
    return units


def _case(name: str, *modules: str) -> Case:
    lists = [names.split() for names in modules]
    return Case(name, (lists,), given=f"modules with the parameters {'; '.join(modules)}")


TIED = Exercise(
    id="07-tied",
    title="One unit for tied weights",
    task="Return a list of units: every parameter once, and modules that share one together.",
    points={"all": 3},
    reference=units_of,
    library=(library.partition,),
    alternatives=(_by_merging,),
    cases=(
        _case("nothing shared", "embed", "a b", "norm"),
        _case("a tied head", "embed", "a b", "norm", "embed bias"),
        _case("shared within a module", "embed", "a b a", "norm"),
        _case("a chain", "embed", "a b", "codes", "codes embed"),
    ),
    fresh=lambda rng: [_fresh(rng)],
    run=zero3_units.named_units,
    nudge="For each module: its parameters; every unit so far that has one of them is merged with "
    "it, and taken out of the list. Sets and dicts compare parameters by identity.",
    misconceptions=(
        Misconception(
            "a unit for each module",
            _each_its_own,
            "A tied weight is in two units: it is counted twice, gathered twice, freed by one "
            "while the other computes; and each has a shard, which are updated apart.",
        ),
        Misconception(
            "the first has it",
            _first_comes,
            "You give a tied weight to the first module alone: every parameter is there once, but "
            "when the other module computes, its weight belongs to a unit that was freed.",
            "Modules that share a parameter are one unit: merge them.",
        ),
        Misconception(
            "the last has it",
            _last_comes,
            "You give a tied weight to the last module alone: when the first one computes, its "
            "weight has not been gathered.",
            "Modules that share a parameter are one unit: merge them.",
        ),
        Misconception(
            "the shared ones apart",
            _shared_apart,
            "You put shared parameters into a unit of their own. No module is that unit, so no "
            "forward would gather it. Put the modules together that share it.",
        ),
        Misconception(
            "left out",
            _skipped,
            "You leave out a module that shares a parameter, with all of its others: these would "
            "be in no unit.",
        ),
        Misconception(
            "the first match alone",
            _first_match,
            "You merge a module with the first unit that it shares a parameter with. It may share "
            "others with a second one: then all three are one unit.",
        ),
        Misconception(
            "neighbours alone",
            _neighbours,
            "You compare a module with the one before it. A head comes long after its embedding: "
            "look at all units so far.",
        ),
        Misconception(
            "twice in one unit",
            _twice_in_one,
            "A parameter is twice in one unit: gathered twice, and its gradient reduced twice. "
            "Keep each once, as module.parameters() does.",
        ),
        Misconception(
            "everything together",
            lambda modules: [list(dict.fromkeys(p for m in modules for p in m.parameters()))],
            "You put all into one unit: then the whole model is gathered at once, and ZeRO-3 saves "
            "nothing while it computes.",
        ),
        Misconception(
            "compared by value",
            _by_value,
            "p in a list compares tensors by value, element by element, which is no yes or no. "
            "Which parameter it is matters: sets and dicts, or `is`.",
        ),
        Misconception(
            "modules",
            lambda modules: [[module] for module in modules],
            "Your units hold modules. They should hold parameters: module.parameters().",
        ),
    ),
)


def _fresh(rng) -> Case:
    """Six modules, of which the last shares one parameter each with two others."""
    middle = [f"w{i} b{i}" for i in range(4)]
    one, other = rng.sample(range(4), 2)
    return _case("six modules", "embed", *middle, f"bias w{one} b{other}")
