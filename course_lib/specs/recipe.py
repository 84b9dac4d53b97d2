"""How a model is trained, as far as bytes go: above all, which copies of the parameters there are.

Training holds the parameters several times over: as parameters, as gradients, perhaps as a master
copy, and as the optimizer's moments, each with one element per parameter. A precision says in
which dtype each is held, an optimizer how many moments there are. Sixteen bytes per parameter, the
figure that everyone quotes, is fp16 parameters (2) and gradients (2), and in the optimizer an fp32
master copy (4) and two fp32 moments (4 + 4).
"""

from dataclasses import dataclass

from course_lib.errors import CourseError
from course_lib.specs.checking import known, whole
from course_lib.specs.optimizer import OPTIMIZERS
from course_lib.specs.precision import DTYPE_BYTES, PRECISIONS

PARAMETERS, GRADIENTS, OPTIMIZER_STATES = "parameters", "gradients", "optimizer_states"
MODEL_STATES = (PARAMETERS, GRADIENTS, OPTIMIZER_STATES)

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Copy:
    """One copy of the parameters that training holds: `category` is one of MODEL_STATES."""

    category: str
    what: str
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes for each parameter."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    `precision` and `optimizer` are names in PRECISIONS and OPTIMIZERS. `micro_batch` sequences of
    `seq_len` tokens pass through a rank at a time, `grad_accum` times before each update.
    `trainable` is the fraction of the parameters that is trained, 0 to 1; the rest is frozen.
    """

    precision: str = "amp-bf16"
    optimizer: str = "adamw"
    micro_batch: int = 1
    seq_len: int = 2048
    grad_accum: int = 1
    checkpointing: str = "none"
    trainable: float = 1.0

    def __post_init__(self) -> None:
        known("precision called", self.precision, PRECISIONS)
        known("optimizer called", self.optimizer, OPTIMIZERS)
        known("checkpointing called", self.checkpointing, CHECKPOINTING)
        whole("micro_batch", self.micro_batch)
        whole("seq_len", self.seq_len)
        whole("grad_accum", self.grad_accum)
        number = isinstance(self.trainable, int | float)
        if not number or not 0 <= self.trainable <= 1:
            raise CourseError(
                f"trainable is {self.trainable!r}: give the fraction of the parameters that is "
                "trained, from 0 (all frozen) to 1 (none frozen)."
            )

    def copies(self) -> tuple[Copy, ...]:
        """Every copy of a trained parameter, in the order of a ledger.

        A frozen parameter has the first alone.
        """
        precision, optimizer = PRECISIONS[self.precision], OPTIMIZERS[self.optimizer]
        moments = optimizer.dtype or precision.master or precision.parameters
        kept = [
            (PARAMETERS, "parameters", precision.parameters),
            (GRADIENTS, "gradients", precision.gradients),
            (OPTIMIZER_STATES, "master copy", precision.master),
            (OPTIMIZER_STATES, "gradient copy", precision.main_gradients),
            *((OPTIMIZER_STATES, moment, moments) for moment in optimizer.moments),
        ]
        return tuple(Copy(*copy) for copy in kept if copy[-1] is not None)

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes that one trained parameter costs where nothing is sharded: 16 for zero-fp16."""
        return sum(copy.bytes for copy in self.copies())

    def trained(self, parameters: int) -> int:
        """How many of `parameters` are trained."""
        return round(self.trainable * parameters)
