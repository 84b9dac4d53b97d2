"""How lesson 07's answers are watched on a rank: what is whole, and what is alive, meanwhile.

Memory that is not there cannot be read without a crash, so zeros are lent, and that is noted.
Memory that nobody has written holds NaN: what it held before might be right by chance.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from course_lib.measure import storage_bytes
from grading.exercises import sharded_run


def fill_new_memory() -> None:
    """From now on, a tensor without values and a storage that grows from nothing hold NaN."""
    sharded_run.fill_new_memory()
    resize = torch.UntypedStorage.resize_

    def filled(storage, nbytes):
        was_empty = not storage.nbytes()
        result = resize(storage, nbytes)
        if was_empty and nbytes:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        return result

    torch.UntypedStorage.resize_ = filled


class Whole:
    """Which units have memory for all their parameters, and have their shapes."""

    def __init__(self, model: nn.Module) -> None:
        self._units = [{p: p.shape for p in block.parameters()} for block in model.blocks]
        self._layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        self._bytes = storage_bytes(self._units[0])
        self._shapes = {p: p.shape for p in model.parameters()}
        self.awaited: list[torch.Tensor] = []
        self.begin()

    def begin(self) -> None:
        self.most, self.lent = 0, False

    def units_whole(self) -> int:
        return sum(all(map(self._is_whole, unit)) for unit in self._units)

    def in_units(self, nbytes: int, none: str = "activations alone") -> str:
        """Bytes in words that leave room for different right answers."""
        units = round(nbytes / self._bytes - 0.05)
        if units <= (none != "activations alone"):
            return none
        return f"about {units} of {len(self._units)} units"

    def lend_zeros(self) -> None:
        """From now on, to layers that have an empty parameter; after the answer's own hooks."""
        for layer in self._layers:
            layer.register_forward_pre_hook(self._on_layer)

    def await_again(self, saved: list[torch.Tensor]) -> None:
        """Of tensors that autograd saved, wait for those that are empty; forget the others."""
        self.awaited = [x for x in saved if x.untyped_storage().nbytes() < x.nbytes]
        saved.clear()

    def _on_layer(self, layer: nn.Linear, _) -> None:
        self.most = max(self.most, self.units_whole())
        if self.awaited:
            self.awaited = [x for x in self.awaited if x.untyped_storage().nbytes() < x.nbytes]
        for parameter in layer.parameters(recurse=False):
            if not self._is_whole(parameter):
                self.lent = True
                parameter.data = torch.zeros(self._shapes[parameter])

    def _is_whole(self, parameter: nn.Parameter) -> bool:
        has = parameter.untyped_storage().nbytes() >= parameter.nbytes
        return has and parameter.shape == self._shapes[parameter]


class Saved(saved_tensors_hooks):
    """Lends zeros to backward where the memory of what forward saved, `tensors`, is gone."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self.tensors: list[torch.Tensor] = []
        self.lent = False

    def __enter__(self) -> "Saved":
        super().__enter__()
        return self

    def _pack(self, saved: torch.Tensor) -> torch.Tensor:
        self.tensors.append(saved)
        return saved

    def _unpack(self, saved: torch.Tensor) -> torch.Tensor:
        if saved.untyped_storage().nbytes() >= saved.nbytes:
            return saved
        self.lent = True
        return torch.zeros(saved.shape, dtype=saved.dtype)


class Gradients:
    """Of whole gradients: the most bytes alive; and how many units are whole as they come."""

    def __init__(self, model: nn.Module, units: Whole) -> None:
        self._made: list[weakref.ref] = []
        self._units = units
        self.begin()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self) -> None:
        self.most = self.whole = 0

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._made.append(weakref.ref(parameter.grad.untyped_storage()))
        alive: Sequence = [storage for made in self._made if (storage := made()) is not None]
        self.most = max(self.most, sum({s.data_ptr(): s.nbytes() for s in alive}.values()))
        self.whole = max(self.whole, self._units.units_whole())
