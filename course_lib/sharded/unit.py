"""A unit of ZeRO-3: parameters that are gathered together, and freed together.

How it is cut. Each tensor is cut flat by itself: N ranks have ceil(numel / N) elements each, and
the last ranks have padding, zeros, where the elements run out. A rank's *shard* of the unit is its
pieces of all tensors, side by side, those of trained tensors first. One all_gather of shards moves
all of them. For N = 3, a tensor of 8 elements and one of 4:

    rank 0 | 0 1 2 | 0 1 |
    rank 1 | 3 4 5 | 2 3 |    what a gather gives [N, S]: a column of pieces is a tensor, row by row
    rank 2 | 6 7 - | - - |

A unit's life, twice for each micro-batch, once in forward and once in backward:

    sharded ──gather()──> on its way ──unshard()──> whole ──free()──> sharded

*Whole*, each parameter has its elements, copied out of the gathered buffer, which is freed.
*Sharded*, it is an empty tensor. Autograd has saved the parameters in forward, and views of them,
and must see them again in backward. So a parameter always comes back into the storage where it was:
freeing it resizes this storage to 0 bytes, which views of it survive. And a parameter is written
behind autograd's back, through a tensor of its own for the same storage, as autograd takes what was
saved for spoilt if it sees a write.

Gradients go the other way. Each is copied, divided by N, into a buffer [N, S] of the trained
tensors' pieces, of which a reduce_scatter gives each rank its row, summed over ranks: the mean.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from course_lib.errors import CourseError
from course_lib.specs.padding import flat_shard


class Unit:
    """One rank's part in a unit: `shard` [S] is what stays, S elements in `sizes` of each tensor.

    Writes `parameters` into the shard and frees them. `modules` are those that use them.
    """

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], reduce_dtype
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.modules = modules
        self.parameters = sorted(parameters, key=lambda p: not p.requires_grad)  # trained first
        self.trained = [p for p in parameters if p.requires_grad]
        self.sizes = [flat_shard(p.numel(), self.world_size) for p in self.parameters]
        self.trained_sizes = self.sizes[: len(self.trained)]
        self.reduce_dtype = reduce_dtype or parameters[0].dtype

        self.shard = parameters[0].detach().new_empty(sum(self.sizes))  # [S]
        self.empty = self.shard.new_empty(0)
        self.spaces = [self.shard.new_zeros(self.world_size, size) for size in self.sizes]  # [N, s]
        pieces = self.shard.split(self.sizes)
        for p, space, piece in zip(self.parameters, self.spaces, pieces, strict=True):
            space.view(-1)[: p.numel()] = p.detach().reshape(-1)
            piece.copy_(space[self.rank])
        self.views = [
            space.view(-1)[: p.numel()].view(p.shape)
            for p, space in zip(self.parameters, self.spaces, strict=True)
        ]  # what a parameter is when it is whole
        self.is_whole = True
        self.gathered: torch.Tensor | None = None  # [N, S], while it is on its way
        self.gathering: dist.Work | None = None
        self.reached = False  # by backward, since it was last freed
        self.free()

        # Its calls, which `gathering` counts.
        self.uses = len(modules)  # how many are expected in a forward
        self.running: list = []  # have begun, and not ended
        self.calls = 0  # have ended in this forward
        self.to_reach = 0  # are still to be reached in backward
        self.open = 0  # have been reached, and are not through

        self.places = dict(zip(self.trained, _slices(self.trained_sizes), strict=True))
        self.gradients: torch.Tensor | None = None  # [S of the trained], summed over micro-batches
        self.awaited: set[nn.Parameter] = set()  # whose gradients backward has not completed yet
        self.put: set[nn.Parameter] = set()  # whose gradients are in `to_reduce`
        self.to_reduce: torch.Tensor | None = None  # [N, S of the trained], this micro-batch's
        self.reduced: torch.Tensor | None = None  # [S of the trained], from the reduce_scatter on
        self.reducing: dist.Work | None = None

    @property
    def is_done(self) -> bool:
        """Has backward no more use of it?"""
        return self.to_reach <= 0 and not self.open and not self.awaited

    # Parameters.

    def gather(self) -> None:
        """Start the all_gather, unless it is under way, or done."""
        if self.is_whole or self.gathering is not None:
            return
        with record_function("gather_buffers"):
            self.gathered = self.shard.new_empty(self.world_size, self.shard.numel())
        self.gathering = dist.all_gather_single(self.gathered.view(-1), self.shard, async_op=True)

    def unshard(self) -> None:
        """Have the parameters whole."""
        if self.is_whole:
            return
        self.gather()
        self.gathering.wait()
        for space in self.spaces:
            space.untyped_storage().resize_(space.nbytes)
        torch.split_with_sizes_copy(self.gathered, self.sizes, dim=1, out=self.spaces)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        self.gathered = self.gathering = None
        self.is_whole = True

    def free(self) -> None:
        """Go back to sharded, from wherever the unit is."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathered = self.gathering = None
        if self.is_whole:
            for parameter, space in zip(self.parameters, self.spaces, strict=True):
                parameter.data = self.empty
                space.untyped_storage().resize_(0)
            self.is_whole = self.reached = False

    # Gradients.

    def await_gradients(self) -> None:
        """Of the trained parameters, those to which the backward that runs now leads."""
        self.awaited = {p for p in self.awaited if _is_led_to(p)}

    def mean_gradients(self) -> torch.Tensor:
        """This rank's shard of them [S of the trained], zeros where there was no backward."""
        if self.gradients is None:
            return self.shard.new_zeros(sum(self.trained_sizes), dtype=self.reduce_dtype)
        return self.gradients

    def put_gradient(self, parameter: nn.Parameter) -> None:
        """Move the gradient of `parameter`, which is complete, to where it will be reduced."""
        self.awaited.remove(parameter)
        self.put.add(parameter)
        gradient = parameter.grad.detach().reshape(-1).to(self.reduce_dtype)
        parameter.grad = None
        pieces = self._buffer()[:, self.places[parameter]]  # [N, s]
        size = pieces.shape[1]
        full, rest = divmod(gradient.numel(), size or 1)  # full rows; elements in the next one
        mine = gradient[: full * size].view(full, size)
        torch.mul(mine, 1 / self.world_size, out=pieces[:full])
        if full < self.world_size:  # the rest, and padding
            pieces[full:] = 0
            torch.mul(gradient[full * size :], 1 / self.world_size, out=pieces[full, :rest])

    def await_reduction(self) -> None:
        """A backward begins: nothing of one that broke off is left."""
        if self.reducing is not None:
            self.reducing.wait()
        self.awaited, self.put = set(self.trained), set()
        self.to_reduce = self.reduced = self.reducing = None

    def reduce(self) -> None:
        """Start the reduce_scatter, with zeros for parameters that got no gradient."""
        whole = self._buffer()
        for parameter in self.places.keys() - self.put:
            whole[:, self.places[parameter]] = 0
        self.put = set()
        with record_function("reduce_buffers"):
            self.reduced = whole.new_empty(whole.shape[1])
        self.reducing = dist.reduce_scatter_single(self.reduced, whole.view(-1), async_op=True)

    def collect(self) -> None:
        """Wait for the reduce_scatter, and add what came to `gradients`."""
        self.reducing.wait()
        if self.gradients is None:
            self.gradients = self.reduced
        else:
            self.gradients += self.reduced
        self.to_reduce = self.reduced = self.reducing = None

    def _buffer(self) -> torch.Tensor:
        if self.to_reduce is None:
            with record_function("reduce_buffers"):
                self.to_reduce = self.shard.new_empty(
                    self.world_size, sum(self.trained_sizes), dtype=self.reduce_dtype
                )
        return self.to_reduce


def partition(
    model: nn.Module, chosen: Sequence[nn.Module] | None
) -> list[tuple[list[nn.Module], list[nn.Parameter]]]:
    """Which modules and parameters make a unit, in the order of the model's modules.

    A parameter belongs to the innermost of the `chosen` modules that has it, by default the
    outermost blocks of ModuleLists, or else to the very module whose own it is. Where that is more
    than one, as with tied weights, they are one unit.

    Errors: CourseError where `chosen` has a module that is not the model's.
    """
    if chosen is not None and not set(chosen) <= set(model.modules()):
        raise CourseError(
            "ZeRO-3 was given a unit that is not among the model's modules, and gathers parameters "
            "when a unit's forward is called: give modules out of model.modules()."
        )
    owned: dict[nn.Module, dict[nn.Parameter, None]] = {}
    _assign(model, None, chosen, owned)
    units: list[tuple[list[nn.Module], dict[nn.Parameter, None]]] = []
    for module, parameters in owned.items():
        tied = [unit for unit in units if unit[1].keys() & parameters.keys()]
        unit = tied[0] if tied else ([], {})
        for other in tied[1:]:
            units.remove(other)
            unit[0].extend(other[0])
            unit[1].update(other[1])
        unit[0].append(module)
        unit[1].update(parameters)
        if not tied:
            units.append(unit)
    return [(modules, list(parameters)) for modules, parameters in units]


def _assign(module: nn.Module, unit: nn.Module | None, chosen, owned: dict) -> None:
    """Note who owns the parameters of `module`, which is inside of `unit`, and of its children."""
    if chosen is not None and module in chosen:
        unit = module
    own = dict.fromkeys(module.parameters(recurse=False))
    if own:
        owned.setdefault(unit or module, {}).update(own)
    for child in module.children():
        is_block = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        starts = chosen is None and unit is None and is_block
        _assign(child, child if starts else unit, chosen, owned)


def _is_led_to(parameter: nn.Parameter) -> bool:
    return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
