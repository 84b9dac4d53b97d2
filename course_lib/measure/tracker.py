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
forward makes counts as an activation while it lives.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from course_lib.ledger import CATEGORIES
from course_lib.measure.live import gradient_tensors, parameter_tensors, state_tensors

ENTER, LEAVE = "profiler::_record_function_enter_new", "profiler::_record_function_exit"


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
        self._model, self._optimizer = model, optimizer
        self._live: Counter = Counter()
        self._known: dict[int, tuple[str, int, weakref.ref]] = {}  # by the storage's id
        self._labels: list[str] = []
        self._changed = False

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
        name = operator._schema.name
        if name == ENTER:
            self._labels.append(args[0])
        elif name == LEAVE and self._labels:
            self._labels.pop()
            self._find()
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, self._by_label())
        if self._changed:
            self.note(name)
        return result

    def _find(self) -> None:
        """Put what is found at its place into its category, whatever it was when it was made."""
        self._put(parameter_tensors(self._model, self._optimizer), "parameters")
        self._put(gradient_tensors(self._model, self._optimizer), "gradients")
        if self._optimizer is not None:
            self._put(state_tensors(self._optimizer), "optimizer_states")

    def _put(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        for tensor in tensors:
            self._add(tensor, category)
            storage = tensor.untyped_storage()
            before, nbytes, reference = self._known[id(storage)]
            if before != category:
                self._live[before] -= nbytes
                self._live[category] += nbytes
                self._known[id(storage)] = category, nbytes, reference
                self._changed = True

    def _add(self, tensor: torch.Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._known:
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
