"""Lesson 09, 09-wrap: units chosen by size, from the inside out."""

from torch import nn

from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded import wrapping as library
from grading.exercises import tune_modules


def auto_wrap(model, least):
    units = []

    def left(module):
        rest = sum(p.numel() for p in module.parameters(recurse=False))
        rest += sum(left(child) for child in module.children())
        if rest < least or module is model or isinstance(module, nn.ModuleList):
            return rest
        units.append(module)
        return 0

    left(model)
    return units


def _inside_out(model, least):
    """Children come after their parents in modules(), so from the end all is bottom up."""
    taken, units = set(), []
    for module in reversed(list(model.modules())[1:]):
        free = set(module.parameters()) - taken
        if sum(p.numel() for p in free) >= least and not isinstance(module, nn.ModuleList):
            units.append(module)
            taken |= free
    return units


def _total(module):
    return sum(p.numel() for p in module.parameters())


def _below(model):
    return [m for m in list(model.modules())[1:] if not isinstance(m, nn.ModuleList)]


def _outside_in(model, least):
    units = []

    def search(module):
        for child in module.children():
            callable_ = not isinstance(child, nn.ModuleList)
            if callable_ and _total(child) >= least:
                units.append(child)
            else:
                search(child)

    search(model)
    return units


def _wrong(
    unit=lambda rest, least: rest >= least,
    is_list=lambda module: isinstance(module, nn.ModuleList),
    is_root=lambda module, model: module is model,
    size=lambda p: p.numel(),
    of_list=lambda rest: rest,
):
    """The reference with one thing wrong."""

    def answer(model, least):
        units = []

        def left(module):
            rest = sum(size(p) for p in module.parameters(recurse=False))
            rest += sum(left(child) for child in module.children())
            if is_root(module, model):
                return rest
            if is_list(module):
                return of_list(rest)
            if not unit(rest, least):
                return rest
            units.append(module)
            return 0

        left(model)
        return units

    return answer


def _case(name: str, described, least: int, given: str) -> Case:
    return Case(name, (described, least), given=f"{given}; least is {least}")


BLOCK = {"attn": {"qkv": 30, "out": 10}, "mlp": {"up": 40, "down": 40}, "norm": 2}
TOLD = "blocks of attn (qkv 30, out 10), mlp (up 40, down 40) and norm 2"
MODEL = {"embed": 60, "layers": [BLOCK, BLOCK], "norm": 2, "head": 60}

WRAP = Exercise(
    id="09-wrap",
    title="Units by size",
    task="Return the smallest modules that have `least` parameters or more, besides inner units'.",
    points={"all": 3},
    reference=auto_wrap,
    library=(library.by_size,),
    alternatives=(_inside_out,),
    cases=(
        _case("a parent of two", {"a": {"b": 6, "c": 6}, "d": 3}, 10, "a has b 6 and c 6; d 3"),
        _case("what is left", {"a": {"b": 10, "c": 4}, "d": 3}, 10, "a has b 10 and c 4; d 3"),
        _case("halves of blocks", MODEL, 70, f"embed 60, two {TOLD}, norm 2, head 60"),
        _case("parts of blocks", MODEL, 40, f"embed 60, two {TOLD}, norm 2, head 60"),
        _case("blocks", MODEL, 100, f"embed 60, two {TOLD}, norm 2, head 60"),
        _case(
            "of its own",
            {"a": {"own": 5, "b": 6}, "c": {"own": 12, "d": 2}},
            10,
            "a has 5 of its own and b 6; c has 12 of its own and d 2",
        ),
        _case("nothing", {"a": 3, "b": [4, 4]}, 10, "a 3, a ModuleList of 4 and 4"),
    ),
    fresh=lambda rng: [_fresh(rng)],
    run=tune_modules.named_units,
    nudge="Write an inner function that gives the parameters which a module leaves to the one "
    "around it: its own (parameters(recurse=False)), and what its children leave. Where these are "
    "enough, the module is a unit, and leaves 0.",
    misconceptions=(
        Misconception(
            "from the outside in",
            _outside_in,
            "You take the largest modules that are large enough. Asked is for the smallest: a "
            "module is looked at after its children.",
        ),
        Misconception(
            "inner units counted again",
            lambda model, least: [m for m in _below(model) if _total(m) >= least],
            "You count parameters of inner units again, for the modules around them. A parameter "
            "belongs to the innermost unit: what is left may be too little.",
        ),
        Misconception(
            "a ModuleList",
            _wrong(is_list=lambda module: False),
            "You make a ModuleList a unit. Nobody calls it, so no hook of it would ever gather: "
            "leave its parameters to the module around it.",
        ),
        Misconception(
            "the model",
            _wrong(is_root=lambda module, model: False),
            "You list the model itself. It is the root unit in any case, and has what is left.",
        ),
        Misconception(
            "more than",
            _wrong(unit=lambda rest, least: rest > least),
            "A module with just `least` parameters is large enough.",
        ),
        Misconception(
            "its own alone",
            lambda model, least: [
                m
                for m in _below(model)
                if sum(p.numel() for p in m.parameters(recurse=False)) >= least
            ],
            "You count a module's own parameters alone, and what is too small in itself is lost. "
            "It is left to the module around it, and counts there.",
        ),
        Misconception(
            "leaves alone",
            lambda model, least: [
                m for m in _below(model) if not list(m.children()) and _total(m) >= least
            ],
            "You look at modules without children alone. Where these are too small, the module "
            "around them may be large enough.",
        ),
        Misconception(
            "lost in a list",
            _wrong(of_list=lambda rest: 0),
            "What lies in a ModuleList is lost in your count. A list is no unit, so it passes on "
            "what its children leave.",
        ),
        Misconception(
            "tensors",
            _wrong(size=lambda p: 1),
            "You count tensors. `least` is a number of parameters: p.numel() of each.",
        ),
        Misconception(
            "the small ones",
            lambda model, least: [m for m in _below(model) if _total(m) < least],
            "You choose what is smaller than `least`: crumbs. A unit has as many or more.",
        ),
        Misconception(
            "every module",
            lambda model, least: _below(model),
            "You choose every module, whatever its size. Small units are crumbs, each with its own "
            "latency.",
        ),
        Misconception(
            "names",
            lambda model, least: [f"{type(m).__name__}" for m in auto_wrap(model, least)],
            "Your list holds names. It should hold the modules themselves.",
        ),
    ),
)


def _fresh(rng) -> Case:
    """A ModuleList whose leftover, with a module beside it, makes a unit of their parent."""
    small, large = rng.randrange(20, 30), rng.randrange(60, 90)
    inner = {"list": [small, large, small], "beside": rng.randrange(20, 30)}
    told = f"a has a ModuleList of {small}, {large} and {small}, and beside it {inner['beside']}"
    return _case("a list in a module", {"a": inner, "b": small}, 60, f"{told}; b {small}")
