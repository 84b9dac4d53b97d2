"""Live bytes of one rank while it works, by category: what is there at every moment, and the peak.

A storage is the block of memory behind tensors; it lives from the operator that makes it until
nothing refers to it. `LiveBytes` sees every operator (a dispatch mode), notes each storage that is
new, and learns from a weak reference when it is gone. Nothing is estimated: the sizes are the
storages' own.

Which category a storage belongs to is told by

1. where it is found: among the model's parameters, as one's gradient, or in the optimizer's state;
2. else the label under which it was made: code that makes a buffer says so with
   `torch.profiler.record_function("gather_buffers")`, which a profiler's trace then shows, too;
3. else when it was made: in forward it is an activation, anything later is "other".

What operators allocate and free within themselves (a kernel's workspace) is not seen, nor is what
C++ makes without an operator (DDP's buckets in PyTorch's reducer). Under `torch.no_grad` too, what
forward makes counts as an activation while it lives. Of a DTensor its local tensor counts, so that
PyTorch's fully_shard can be followed, too.

Under the FSDP of this course a parameter counts with the parameters while it is whole, too.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from course_lib.ledger import CATEGORIES
from course_lib.measure.live import kept, state_tensors

ENTER, LEAVE = "profiler::_record_function_enter_new", "profiler::_record_function_exit"

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Moment:
    """What was live after an operator: bytes of each category that has any, and what was done.

    `where` is the innermost label of record_function, or else "forward" or "backward"; `operator`
    is the operator's name.
    """

    live: dict[str, int]
    where: str
    operator: str

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.live.values())


class LiveBytes(TorchDispatchMode):
    """Tracks a step: `with LiveBytes(model, optimizer) as live: …`, then `live.peak`.

    `optimizer` is a torch optimizer, or anything with a `state_tensors()`; None where there is
    none. `timeline` has a Moment for each change, in order; the first is what was there before,
    the last what is there at the end.
    """

    def __init__(self, model: torch.nn.Module, optimizer=None) -> None:
        super().__init__()
        self.timeline: list[Moment] = []
        self._modules, self._optimizer = list(model.modules()), optimizer
        self._live: Counter = Counter()
        self._known: dict[int, tuple[str, int, weakref.ref]] = {}  # by the storage's id
        self._labels: list[str] = []
        self._changed = self._resizing = False

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes."""
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def now(self) -> dict[str, int]:
        """Bytes of each category that has any, at this moment."""
        self._find()
        return {name: self._live[name] for name in CATEGORIES if self._live[name]}

    def __enter__(self) -> "LiveBytes":
        self.note("before")
        resize = torch.UntypedStorage.resize_

        def resized(storage, nbytes):
            if not self._resizing:  # the first after an operator
                self._find()  # while what it belongs to is at its place
            self._resizing = True
            result = resize(storage, nbytes)
            self._resized(storage)
            return result

        self._resize, torch.UntypedStorage.resize_ = resize, resized  # no operator
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._resize
        self.note("after")
        super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(map(_is_dtensor, types)):
            return NotImplemented  # it calls operators on its local tensors, which come here
        self._resizing = False
        name = operator._schema.name
        if name == ENTER:
            self._labels.append(args[0])
        elif name == LEAVE and self._labels:
            self._labels.pop()
            self._find()
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, "")
        if self._changed:
            self.note(name)
        return result

    def _find(self) -> None:
        """Put what is found at its place into its category, whatever it was when it was made."""
        each = [p for m in self._modules for p in m._parameters.values() if p is not None]
        self._put([*each, *kept(self._optimizer, "parameter_tensors")], "parameters")
        gradients = [p.grad for p in each if p.grad is not None]
        self._put([*gradients, *kept(self._optimizer, "gradient_tensors")], "gradients")
        if self._optimizer is not None and not self._in_backward():  # it makes states in its step
            self._put(state_tensors(self._optimizer), "optimizer_states")

    def _put(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            key = id(storage)
            known = self._known.get(key)
            if known and known[0] == category and known[1] == storage.nbytes():
                continue  # nearly always: this runs at each change
            self._add(tensor, category)
            before, nbytes, reference = self._known[key]
            if before != category:
                self._live[before] -= nbytes
                self._live[category] += nbytes
                self._known[key] = category, nbytes, reference
                self._changed = True

    def _add(self, tensor: torch.Tensor, category: str) -> None:
        """Know its storage, at least from now on; where '' is given, by its label."""
        storage = _local(tensor).untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._known:
            category = category or self._by_label()
            self._known[key] = category, nbytes, weakref.ref(storage, lambda _: self._drop(key))
            self._live[category] += nbytes
            self._changed = True
        elif nbytes != self._known[key][1]:  # an operator resized it
            self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if known := self._known.get(id(storage)):
            category, before, reference = known
            self._known[id(storage)] = category, storage.nbytes(), reference
            self._live[category] += storage.nbytes() - before
            self._changed = True

    def _drop(self, key: int) -> None:
        category, nbytes, _ = self._known.pop(key)
        self._live[category] -= nbytes
        self._changed = True

    def _by_label(self) -> str:
        for label in reversed(self._labels):
            if label in CATEGORIES:
                return label
        return "other" if self._in_backward() or self._labels else "activations"

    def _in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def note(self, operator: str) -> None:
        """Add a Moment to the timeline, as it is now; `operator` says what was done."""
        phase = "backward" if self._in_backward() else "forward"
        where = self._labels[-1] if self._labels else phase
        self.timeline.append(Moment(self.now, where, operator))
        self._changed = False


def _is_dtensor(kind: type) -> bool:
    return kind not in PLAIN and issubclass(kind, torch.Tensor) and hasattr(kind, "_local_tensor")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    kind = type(tensor)
    return tensor if kind in PLAIN or not _is_dtensor(kind) else tensor._local_tensor
