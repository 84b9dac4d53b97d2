"""Lesson 08, 08-meta: a model that does not fit is made unit by unit. In one process, no ranks."""

import torch
from torch import nn

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.sharded.fsdp_unit import FSDPUnit
from grading.exercises import life_running


def rows_of(tensor, rank, ranks):
    """As in the lesson: the rank's rows of a tensor, a copy."""
    chunks = tensor.detach().chunk(ranks)
    return chunks[rank].clone() if rank < len(chunks) else tensor.detach()[:0].clone()


def make(units, rank, ranks):
    shards = []
    for unit in units:
        unit.to_empty(device="cpu")
        for module in unit.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        shards.append({name: rows_of(p, rank, ranks) for name, p in unit.named_parameters()})
        unit.to_empty(device="meta")
    return shards


def _layer_by_layer(units, rank, ranks):
    """A different way to the same: a module at a time, its parameters replaced by their rows."""
    shards = []
    for unit in units:
        shards.append({})
        for path, module in unit.named_modules():
            if not module._parameters:
                continue
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
            for name, p in list(module._parameters.items()):
                mine = nn.Parameter(rows_of(p, rank, ranks))
                shards[-1][f"{path}.{name}"] = module._parameters[name] = mine
    return shards


def _with(first=None, reset=True, cut=rows_of, free=True):
    """The reference with one thing wrong. `first(units)` is done before anything."""

    def answer(units, rank, ranks):
        shards = []
        if first:
            first(units)
        for unit in units:
            if not first:
                unit.to_empty(device="cpu")
            if reset:
                _reset(unit)
            shards.append({name: cut(p, rank, ranks) for name, p in unit.named_parameters()})
            if free:
                unit.to_empty(device="meta")
        return shards

    return answer


def _reset(unit):
    for module in unit.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _all_at_once(units):
    nn.ModuleList(units).to_empty(device="cpu")


def _view(tensor, rank, ranks):
    chunks = tensor.detach().chunk(ranks)
    return chunks[rank] if rank < len(chunks) else tensor.detach()[:0]


def _flat(tensor, rank, ranks):
    return rows_of(tensor.flatten(), rank, ranks)


def _even(tensor, rank, ranks):
    return tensor.detach().tensor_split(ranks)[rank].clone()


def _rows_reset(units, rank, ranks):
    """Rows are made, and these filled: no parameter is ever whole, and ranks have the same rows."""
    shards = []
    for unit in units:
        for module in unit.modules():
            for name, p in list(module._parameters.items()):
                rows = rows_of(p, rank, ranks)
                module._parameters[name] = nn.Parameter(torch.empty(rows.shape))
        _reset(unit)
        shards.append({name: p.detach() for name, p in unit.named_parameters()})
    return shards


def _case(width: int, count: int, rank: int, ranks: int, seed: int) -> Case:
    given = f"{count} units on the meta device: Linear({width}, {3 * width}), LayerNorm, Tanh"
    name = f"rank {rank} of {ranks}, {count} units"
    return Case(name, (width, count, rank, ranks, seed), given=given)


META = Exercise(
    id="08-meta",
    title="Make it unit by unit",
    task="Make, fill, cut and let go of each unit; return this rank's rows.",
    points={"all": 4},
    reference=make,
    library=(FSDPUnit._cut,),
    alternatives=(_layer_by_layer,),
    cases=(_case(6, 8, 0, 8, 1), _case(6, 8, 7, 8, 1)),
    fresh=lambda rng: [
        _case(rng.randrange(5, 9), 10, rng.randrange(1, 4), 4, rng.randrange(10**6))
    ],
    run=life_running.made,
    compare=close(1e-4, 3e-6),
    nudge="For each unit: unit.to_empty(device='cpu'); reset_parameters() of each of its modules "
    "that has it; {name: rows_of(p, rank, ranks)}; unit.to_empty(device='meta').",
    misconceptions=(
        Misconception(
            "all at once",
            _with(first=_all_at_once),
            "You make all units before you cut the first: the whole model is there at once, and "
            "it is one that does not fit. Make a unit, cut it, let go of it, then the next.",
        ),
        Misconception(
            "never let go",
            _with(free=False),
            "Each unit stays whole after you cut it: at the end the whole model is there, and the "
            "shards besides.",
            "unit.to_empty(device='meta') takes its memory away.",
        ),
        Misconception(
            "shards that are views",
            _with(cut=_view),
            "Your shards are views of whole parameters, and keep all of their memory. Clone the "
            "rows; rows_of does.",
        ),
        Misconception(
            "memory not filled",
            _with(reset=False),
            "to_empty gives memory, and no numbers: what is in it is chance. reset_parameters() "
            "of each module fills it.",
        ),
        Misconception(
            "rows filled one by one",
            _rows_reset,
            "You fill a rank's rows by themselves. All ranks draw the same random numbers, so all "
            "shards begin alike: the parameter is one piece, repeated. Fill it whole, then cut.",
        ),
        Misconception(
            "cut flat",
            _with(cut=_flat),
            "You cut the elements, as ZeRO-3 does. FSDP2 cuts rows: a shard of [D, K] is "
            "[rows, K].",
        ),
        Misconception(
            "cut as even as can be",
            _with(cut=_even),
            "You deal rows out evenly; FSDP2 gives ⌈D/N⌉ to each rank, as long as there are any.",
        ),
    ),
)
