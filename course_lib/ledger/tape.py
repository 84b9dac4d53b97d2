"""Autograd on tensors that have nothing but a size: what is alive as forward runs, and backward.

A program computes with these tensors as a model does with PyTorch's. What it makes is counted while
anything refers to it, as there: a local variable of the program, an operator that saved it for its
backward. Backward then runs the operators in reverse, the latest first, each as soon as all
gradients of its output have come; what an operator saved is let go when its backward is done. So
the bytes that are alive are known at every moment, and nothing is computed.

The rules are those of PyTorch's engine: of what is ready the latest operator runs next, but a
parameter's gradient before any other. Where a tensor was used twice, its gradients are added up in
place; or, with `sums_in_place` False, to a third, as PyTorch does while a dispatch mode looks on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush

ACTIVATIONS, LOGITS, OTHER = range(3)  # what is alive is told by these
NAMES = ("activations", "logits", "other")
LAST = 1 << 62


class Storage:
    """A block of memory: counted from when it is made until nothing refers to it."""

    __slots__ = ("__weakref__", "category", "nbytes", "tape")

    def __init__(self, tape: Tape, nbytes: int, category: int) -> None:
        self.tape, self.nbytes, self.category = tape, nbytes, category
        tape.live[category] += nbytes
        tape.now += nbytes
        if tape.now > tape.most:
            tape.most, tape.split = tape.now, tuple(tape.live)

    def __del__(self) -> None:
        self.tape.live[self.category] -= self.nbytes
        self.tape.now -= self.nbytes


class Node:
    """An operator that ran. `backward` has what it saved: from the gradient of its output it makes
    those of its `inputs`, in their order, None for what needs none. `hooks` are called before."""

    __slots__ = ("backward", "hooks", "inputs", "number")

    def __init__(self, number: int, inputs: Sequence[Node | None], backward: Callable) -> None:
        self.number, self.inputs, self.backward = number, inputs, backward
        self.hooks: tuple[Callable[[], None], ...] = ()

    def __lt__(self, other: Node) -> bool:
        return self.number > other.number


class Tensor:
    """`numel` elements of `itemsize` bytes. `node` made it; None where no gradient is needed."""

    __slots__ = ("itemsize", "node", "numel", "storage")

    def __init__(self, storage: Storage | None, numel: int, itemsize: int, node: Node | None):
        self.storage, self.numel, self.itemsize, self.node = storage, numel, itemsize, node

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class Tape:
    """Where a program runs: bytes alive `now`, and the `most` since `mark`, with its `split`."""

    def __init__(self, sums_in_place: bool = True) -> None:
        self.sums_in_place = sums_in_place
        self.live = [0, 0, 0]
        self.now = 0
        self.category, self.records = ACTIVATIONS, True
        self.number = 0
        self.mark()

    def mark(self, gone: int = 0) -> None:
        """From now on there is a new `most`, when as many bytes of a gradient are gone."""
        activations, logits, other = self.live
        self.most, self.split = self.now - gone, (activations, logits, other - gone)

    def new(self, nbytes: int, category: int | None = None) -> Storage:
        return Storage(self, nbytes, self.category if category is None else category)

    def parameter(self, numel: int, itemsize: int, on_gradient: Callable | None) -> Tensor:
        """A tensor that is not counted here; `on_gradient()` is called when its gradient is
        complete, and still there. None: it is frozen."""
        if on_gradient is None:
            return Tensor(None, numel, itemsize, None)

        def accumulate(gradient):
            on_gradient()
            return ()

        return Tensor(None, numel, itemsize, Node(LAST, (), accumulate))

    def leaf(self, gradients: list[Storage | None], place: int) -> Node:
        """Where backward stops: it leaves the gradient in `gradients`."""

        def keep(gradient):
            gradients[place] = gradient
            return ()

        return Node(LAST, (), keep)

    def made(
        self,
        storage: Storage | None,
        numel: int,
        itemsize: int,
        inputs: Sequence[Tensor],
        backward: Callable[[Storage], Iterable[Storage | None]],
    ) -> Tensor:
        """The output of an operator on `inputs`; new memory where no `storage` is given."""
        storage = storage or self.new(numel * itemsize)
        node, nodes = None, [x.node for x in inputs]
        if self.records and any(nodes):
            self.number += 1
            node = Node(self.number, nodes, backward)
        return Tensor(storage, numel, itemsize, node)

    @contextmanager
    def recording(self, records: bool, category: int):
        """Save for backward, or not; what is made is of that category."""
        before = self.records, self.category
        self.records, self.category = records, category
        yield
        self.records, self.category = before

    def backward(self, root: Node | None, gradient: Storage) -> None:
        """Run it all back from the operator `root`, given the gradient of its output."""
        if root is not None:
            with self.recording(False, OTHER):
                self._run(root, {root: gradient})

    def _run(self, root: Node, gradients: dict[Node, Storage]) -> None:
        ready, to_come = [root], _uses(root)
        while ready:
            node = heappop(ready)
            for hook in node.hooks:
                hook()
            results = list(node.backward(gradients.pop(node)))
            node.backward = None  # what it saved is let go
            for parent in node.inputs:
                result = results.pop(0)
                if parent is None:
                    continue
                to_come[parent] -= 1
                if parent not in gradients:
                    gradients[parent] = result
                elif not self.sums_in_place:
                    gradients[parent] = self.new(result.nbytes)
                if not to_come[parent]:
                    heappush(ready, parent)
            node = result = None


def _uses(root: Node) -> dict[Node, int]:
    """How many gradients each node waits for."""
    uses, to_visit = {root: 0}, [root]
    while to_visit:
        for parent in to_visit.pop().inputs:
            if parent is not None:
                if parent not in uses:
                    uses[parent] = 0
                    to_visit.append(parent)
                uses[parent] += 1
    return uses
