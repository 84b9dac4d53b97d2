"""Which modules are units: policies, beside PyTorch's own, and who owns which parameter."""

from functools import partial

import pytest
import torch
from fsdp_cases import Tower, twice
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from course_lib import models
from course_lib.errors import CourseError
from course_lib.sharded import wrapping
from course_lib.specs import read_config

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 11,
}


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def wrapped_by_torch(build, least: int) -> list[str]:
    """Names of what size_based_auto_wrap_policy wraps, bottom up."""
    model = build()
    names = {module: name for name, module in model.named_modules()}
    wrapped = []

    def wrap(module: nn.Module, **_) -> nn.Module:
        wrapped.append(names[module])
        return Wrapped(module)

    policy = partial(size_based_auto_wrap_policy, min_num_params=least)
    _recursive_wrap(model, policy, wrap, set(), set(), only_wrap_children=True)
    return wrapped


def mixed() -> nn.Module:
    """Attention whose children are not called, lists, dicts, and parameters in a list."""
    return nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(6, 2, 10),
            "heads": nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)) for _ in "ab"),
            "tables": nn.ModuleDict({"small": nn.Embedding(3, 6), "large": nn.Embedding(40, 6)}),
        }
    )


def decoder() -> nn.Module:
    return models.build(read_config(CONFIG))


@pytest.mark.parametrize("build", [Tower, mixed, decoder])
def test_by_size_is_pytorchs_policy(build):
    sizes = set()
    for least in (1, 20, 36, 60, 100, 150, 250, 400, 10_000):
        model = build()
        names = {module: name for name, module in model.named_modules()}
        chosen = [names[module] for module in wrapping.by_size(model, least)]
        assert chosen == wrapped_by_torch(build, least), least
        sizes.add(len(chosen))
    assert len(sizes) > 2  # there was something to choose


def test_by_size_counts_what_smaller_units_leave():
    """`up` has 42, `down` has 40, the norm 10. Without `up` the block has 50."""
    tower = Tower(deep=1)
    block = tower.blocks[0]
    assert wrapping.by_size(tower, 40) == [block.up, block.down]
    assert wrapping.by_size(tower, 41) == [block.up, block]
    assert wrapping.by_size(tower, 43) == [block]
    assert wrapping.by_size(tower, 93) == []


def test_a_tied_parameter_counts_once():
    tied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert wrapping.by_size(tied, 20) == [tied[0], tied[2]]


def test_parameters_in_a_list_are_the_units_around_it():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].more = nn.ParameterList([torch.zeros(30)])
    assert wrapping.by_size(module, 20) == [module[0]]
    assert len(wrapping.assign(module, [module[0]])[module[0]]) == 3


def test_by_class_and_by_blocks():
    tower = Tower()
    assert wrapping.by_class(tower, nn.LayerNorm) == [block.norm for block in tower.blocks]
    assert wrapping.by_class(tower, nn.Linear)[1:3] == [tower.blocks[0].up, tower.blocks[0].down]
    assert wrapping.blocks(tower) == list(tower.blocks)
    nested = nn.Sequential(nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), Tower()]))
    assert wrapping.blocks(nested) == [nested[0][0][0], nested[0][1]]


def test_a_parameter_belongs_to_the_innermost_unit_and_the_rest_to_the_root():
    tower = Tower(twice)
    first, second, third = tower.blocks
    units = wrapping.assign(tower, [first, first.up, second.norm])
    assert list(units) == [tower, first, first.up, second.norm]
    assert list(units[first.up]) == [first.up.weight, first.up.bias]
    assert first.norm.weight in units[first]
    assert {third.up.weight, second.up.weight, tower.stem.bias} <= units[tower].keys()
    every = [p for parameters in units.values() for p in parameters]
    assert sorted(map(id, every)) == sorted(map(id, tower.parameters()))


def test_places_are_all_where_a_tied_parameter_is():
    tower = Tower()
    tower.head.bias = tower.extra = nn.Parameter(torch.zeros(2))
    places = wrapping.assign(tower, list(tower.blocks))[tower][tower.extra]
    assert places == [(tower, "extra"), (tower.head, "bias")]


def shared_between_units():
    tower = Tower()
    tower.blocks[2].up.weight = tower.blocks[0].up.weight
    wrapping.assign(tower, list(tower.blocks))


def shared_with_the_root():
    tower = Tower()
    tower.blocks[0].norm.bias = tower.stem.bias
    wrapping.assign(tower, list(tower.blocks))


ERRORS = [
    (shared_between_units, "'blocks.0' and 'blocks.2' share a parameter .'weight'.*leave both"),
    (shared_with_the_root, "'the root' and 'blocks.0' share a parameter"),
    (lambda: wrapping.assign(Tower(), [nn.Linear(1, 1)]), "given a Linear as a unit"),
    (lambda: wrapping.assign(tower := Tower(), [tower.blocks]), "given a ModuleList as a unit"),
    (lambda: wrapping.assign(Tower(), ["blocks.0"]), "given a str as a unit"),
    (lambda: wrapping.by_size(Tower(), 0), "least"),
]


@pytest.mark.parametrize("fn, message", ERRORS)
def test_errors_say_what_to_do(fn, message):
    with pytest.raises(CourseError, match=message):
        fn()
