"""What one micro-batch does on a rank that has everything: the part of a step no stage changes.

Activations, and what operators make on the way, are the same whatever is sharded. Here a program
(see `programs`) runs on a tape, forward and backward, and the record says when something happens of
which a stage takes advantage: forward enters and leaves a module, backward reaches it, is through
with it, and completes a gradient. What a checkpoint computes again within backward is there, too.
`measure.work` records the same of a real model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from course_lib.comm.step import gathered_as
from course_lib.ledger.execution import CUDA, Execution
from course_lib.ledger.programs import Program
from course_lib.ledger.tape import ACTIVATIONS, Storage, Tape, Tensor
from course_lib.specs import DTYPE_BYTES, ModelSpec, Recipe

AUTOCAST = "amp-bf16"
SHALLOW = 4  # blocks: the first and the last two differ from the others, in what is on its way


class Event(NamedTuple):
    """What is live besides parameters and complete gradients: bytes now, and the most since the
    event before. The gradient that an event completes is still among them, and gone after it.

    `kind` is 'enter', 'leave', 'reach' or 'through', of the module called `name` ('' is the model),
    or 'gradient', of the parameter called `name`; 'loss' is the end of forward, 'end' that of the
    micro-batch. `live` and `split` are the bytes of `now` and `most` by category, as in tape.NAMES;
    () if not known.
    """

    kind: str
    name: str
    now: int
    most: int
    live: tuple[int, ...] = ()
    split: tuple[int, ...] = ()


def work(
    model: ModelSpec,
    recipe: Recipe,
    execution: Execution = CUDA,
    modules: Collection[str] | None = None,
) -> tuple[Event, ...]:
    """The events of one micro-batch; of modules, those in `modules`, or all.

    Of a model that is trained in part, the same part of each weight is taken to be trained. Blocks
    are alike: of a deep model SHALLOW run, and what the second one does is repeated.
    """
    return _work(model, recipe, execution, None if modules is None else frozenset(modules))


@lru_cache(maxsize=32)  # it is the same on any number of ranks
def _work(
    model: ModelSpec, recipe: Recipe, execution: Execution, modules: frozenset[str] | None
) -> tuple[Event, ...]:
    if model.num_layers <= SHALLOW:
        return _run(model, recipe, execution, modules)
    block = re.compile(rf"({re.escape(model.blocks)})\.(\d+)(.*)")
    shallow = replace(model, num_layers=SHALLOW)
    if modules is not None:  # what is watched in one block, in all; and where blocks begin and end
        found = {name: block.fullmatch(name) for name in modules}
        inside = {"", *(match[3] for match in found.values() if match)}
        modules = {name for name, match in found.items() if not match}
        modules |= {f"{model.blocks}.{i}{x}" for i in range(SHALLOW) for x in inside}
    return _deepened(_run(shallow, recipe, execution, modules), block, model.num_layers)


def _deepened(events: Sequence[Event], block: re.Pattern, layers: int) -> tuple[Event, ...]:
    """Events of SHALLOW blocks as those of `layers`: the second block's stand for more of them."""
    more = layers - SHALLOW
    matches = [block.fullmatch(event.name) for event in events]
    owners = [int(match[2]) if match else None for match in matches]
    first = {}  # event of each block, in forward and in backward
    for i, (event, owner) in enumerate(zip(events, owners, strict=True)):
        if owner is not None and event.kind in ("enter", "reach"):
            first.setdefault((event.kind, owner), i)
    loss = next(i for i, event in enumerate(events) if event.kind == "loss")
    one, two = first["enter", 1], first["enter", 2]
    end = first.get(("reach", 0), len(events))
    begin = first.get(("reach", 1), end)

    def step(i: int, k: int) -> list[int]:  # of one block, by category
        return [b - a for a, b in zip(events[i].live, events[k].live, strict=True)]

    in_forward = step(one, two)
    in_backward = step(begin, first["reach", 2]) if begin < end else in_forward

    around = [match and (match[1], match[3]) for match in matches]

    def shifted(i: int, count: int) -> Event:
        """Event i, with `count` more blocks before it."""
        if not count:
            return events[i]
        kind, name, now, most, (a, b, c), (d, e, f) = events[i]
        if owners[i] is not None:
            before, after = around[i]
            name = f"{before}.{owners[i] + count}{after}"
        x, y, z = in_forward if i < loss else in_backward  # autocast's copies are gone
        live = (a + count * x, b + count * y, c + count * z)
        x, y, z = in_forward if i <= loss else in_backward
        split = (d + count * x, e + count * y, f + count * z)
        return Event(kind, name, sum(live), sum(split), live, split)

    made = [shifted(i, 0) for i in range(two)]
    made += [shifted(i, count) for count in range(1, more + 1) for i in range(one, two)]
    made += [shifted(i, more) for i in range(two, begin)]
    made += [shifted(i, count) for count in range(more, -1, -1) for i in range(begin, end)]
    return (*made, *(shifted(i, 0) for i in range(end, len(events))))


def _run(model, recipe, execution, modules) -> tuple[Event, ...]:
    run = Run(model, recipe, execution, modules)
    loss = run.loss()
    run.casts.clear()  # autocast keeps them for forward alone
    run.note("loss", "")
    run.tape.backward(loss.node, run.tape.new(loss.nbytes))
    run.logits.clear()
    run.note("end", "")
    return tuple(run.events)


class Run(Program):
    """A program whose modules and weights tell what happens."""

    def __init__(self, model, recipe, execution, modules, tape=Tape) -> None:
        self.events: list[Event] = []
        self.modules, self.recipe = modules, recipe
        shape = recipe.micro_batch, recipe.seq_len
        autocast = recipe.precision == AUTOCAST
        super().__init__(
            tape(execution.sums_in_place), model, execution, shape, autocast, recipe.checkpointing
        )
        self.itemsize = DTYPE_BYTES[gathered_as(recipe)]
        self.numels = {tensor.name: tensor.numel for tensor in model.tensors()}
        self.weights: dict[str, Tensor] = {}

    def note(self, kind: str, name: str) -> None:
        tape = self.tape
        self.events.append(Event(kind, name, tape.now, tape.most, tuple(tape.live), tape.split))
        tape.mark()

    def has(self, weight: str) -> bool:
        return weight in self.numels

    def numel(self, name: str) -> int:
        return self.numels[name] if self.has(name) else next(iter(self.numels.values()))

    def weight(self, name: str) -> Tensor:
        if not self.has(name):  # a head that is tied to the embedding, the first
            name = next(iter(self.numels))
        if name not in self.weights:
            numel = self.recipe.trained(self.numels[name])
            on_gradient = partial(self._complete, name, numel * self.itemsize)
            on_gradient = on_gradient if numel else None
            self.weights[name] = self.tape.parameter(numel, self.itemsize, on_gradient)
        return self.weights[name]

    def _complete(self, name: str, nbytes: int) -> None:
        self.note("gradient", name)
        self.tape.mark(gone=nbytes)  # before anything else is made

    def module(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.modules is not None and name not in self.modules:
            return forward(x)
        self.note("enter", name)
        if x.node and self.tape.records:
            x = self.tape.made(x.storage, x.numel, x.itemsize, (x,), self._through(name))
        x = forward(x)
        self.note("leave", name)
        if x.node:
            x.node.hooks += (lambda: self.note("reach", name),)
        return x

    def _through(self, name: str) -> Callable[[Storage], list[Storage]]:
        def backward(gradient: Storage) -> list[Storage]:
            self.note("through", name)
            return [gradient]

        return backward

    def checkpoint(self, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Forward saves its inputs alone, and is computed again in backward."""
        tape = self.tape
        with tape.recording(False, tape.category):
            out = forward(*inputs)
        saved = [(x.storage, x.numel, x.itemsize) for x in inputs]

        def backward(gradient: Storage, saved=saved):
            gradients: list[Storage | None] = [None] * len(saved)
            leaves = [Tensor(*x, tape.leaf(gradients, i)) for i, x in enumerate(saved)]
            with tape.recording(True, ACTIVATIONS):
                node = forward(*leaves).node
            self.casts.clear()
            del leaves
            tape.backward(node, gradient)
            return gradients

        return tape.made(out.storage, out.numel, out.itemsize, inputs, backward)
