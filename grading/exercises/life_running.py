"""How lesson 08's answers are called that need no ranks: on modules, made from a case's numbers.

What comes back is plain data, names in place of modules and parameters, and words for memory.
"""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from course_lib.checks.exercise import Answer, Case
from grading.exercises import small_model

ROOT, REFUSED = "the root", "refused with a ValueError"


def pair(answer: Answer, case: Case) -> list:
    """What it returned, two numbers: a tuple is as good as a list."""
    first, stop = answer(*case.args)
    return [first, stop]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(2, 3, bias=False)


def named(answer: Answer, case: Case) -> object:
    """`answer(model, chosen)`, with names in place of modules and parameters."""
    blocks, chosen, tied = case.args
    model = Model(blocks)
    for one, other in tied:
        model.get_submodule(other).weight = model.get_submodule(one).weight
    modules = {module: name or ROOT for name, module in model.named_modules()}
    names = {p: name for name, p in model.named_parameters()}
    try:
        units = answer(model, [model.get_submodule(name) for name in chosen])
    except ValueError:
        return REFUSED
    if not isinstance(units, dict) or not all(module in modules for module in units):
        return f"a {type(units).__name__}, where a dict of modules was expected: {units!r:.60}"
    found = {modules[unit]: sorted(names[p] for p in ps) for unit, ps in units.items()}
    return {unit: ", ".join(of_it) for unit, of_it in found.items() if of_it or unit == ROOT}


class LiveBytes(TorchDispatchMode):
    """Bytes alive of what is made in here, off the meta device: `now`, and at `most`.

    New memory holds NaN, so that no number is right by chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self._add(x.untyped_storage())
                if operator._schema.name.startswith(("aten::empty", "aten::new_empty")):
                    x.fill_(torch.nan)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._drop(key, nbytes))
            self.now += nbytes
            self.most = max(self.most, self.now)

    def _drop(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self.now -= nbytes


def made(answer: Answer, case: Case) -> object:
    """`answer(units, rank, ranks)`: the shards, and the most and the last that was alive."""
    width, count, rank, ranks, seed = case.args
    with torch.device("meta"):
        units = [
            nn.Sequential(nn.Linear(width, 3 * width), nn.LayerNorm(3 * width), nn.Tanh())
            for _ in range(count)
        ]
    unit = sum(p.nbytes for p in units[0].parameters())
    with torch.random.fork_rng(devices=[]), LiveBytes() as live:
        torch.manual_seed(seed)
        shards = answer(list(units), rank, ranks)
    if not isinstance(shards, list) or not all(isinstance(each, dict) for each in shards):
        return f"it must return a list with a dict for each unit; it returned {shards!r:.60}"
    tensors = [x for each in shards for x in each.values()]
    if not all(isinstance(x, torch.Tensor) and not x.is_meta for x in tensors):
        return "each name must have a tensor with this rank's rows, not on the meta device"
    held = sum(x.nbytes for x in tensors)
    return {
        "most units whole at a time": _in_words((live.most - held) / unit),
        "units whole at the end": _in_words((live.now - held) / unit, "none"),
        "shards": [{name: _numbers(x) for name, x in each.items()} for each in shards],
    }


def _in_words(units: float, least: str = "one or two") -> str:
    """With room for what different right answers need for a moment."""
    limit = 2.3 if least == "one or two" else 0.5
    return least if units <= limit else f"about {units:.0f}"


def _numbers(tensor: torch.Tensor) -> list | str:
    if tensor.isnan().any():
        return "memory that nobody has written"
    return tensor.detach().double().numpy().round(small_model.DIGITS).tolist()
