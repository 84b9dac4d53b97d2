"""What one block keeps for backward, tensor by tensor, and which operator made each."""

import sys
import weakref
from dataclasses import dataclass, replace

from course_lib.ledger import operators
from course_lib.ledger.execution import CUDA, Execution
from course_lib.ledger.tape import Storage, Tape
from course_lib.ledger.work import Run
from course_lib.specs import ModelSpec, Recipe

OPERATORS = operators.__name__


@dataclass(frozen=True)
class Saved:
    """`bytes` that are there from a block's forward to its backward: `operator` made them, in the
    module called `module` within the block ('' is the block itself)."""

    module: str
    operator: str
    bytes: int


def saved(model: ModelSpec, recipe: Recipe, execution: Execution = CUDA) -> list[Saved]:
    """What a block in the middle leaves to backward, in the order in which it is made.

    Its own input is the output of the block before, and its output is among them: as many bytes.
    """
    run = _Watched(replace(model, num_layers=2), recipe, execution)
    run.loss()
    return run.found


class _Watched(Run):
    """A program that knows where each tensor was made, and looks when the second block is left."""

    def __init__(self, model: ModelSpec, recipe: Recipe, execution: Execution) -> None:
        super().__init__(model, recipe, execution, None, _Named)
        self.block, self.found = f"{model.blocks}.1", []

    def note(self, kind: str, name: str) -> None:
        made = self.tape.made_by
        if kind == "enter":
            if name == self.block:
                made.clear()
            self.tape.inside.append(name)
        elif kind == "leave":
            self.tape.inside.pop()
            if name == self.block:
                alive = [(x(), module, operator) for x, module, operator in made]
                self.found = [
                    Saved(module[len(name) + 1 :], operator, storage.nbytes)
                    for storage, module, operator in alive
                    if storage is not None
                ]


class _Named(Tape):
    """A tape that notes who makes what."""

    def __init__(self, sums_in_place: bool) -> None:
        super().__init__(sums_in_place)
        self.inside: list[str] = []
        self.made_by: list[tuple[weakref.ref, str, str]] = []

    def new(self, nbytes: int, category: int | None = None) -> Storage:
        storage = super().new(nbytes, category)
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"] != OPERATORS:
            frame = frame.f_back
        operator = frame.f_code.co_name if frame.f_back else ""
        where = self.inside[-1] if self.inside else ""
        self.made_by.append((weakref.ref(storage), where, operator))
        return storage
