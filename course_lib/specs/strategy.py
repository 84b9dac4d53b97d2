"""How a job is spread over ranks: which model states each rank holds only its shard of.

The ladder of ZeRO is SHARDED, read downwards. FSDP shards all that ZeRO-3 does; HSDP does so within
a node, and keeps a whole copy on every node.

What is not sharded stands whole on every rank. How a shard is cut differs, see ledger.shards.
"""

import re
from dataclasses import dataclass

from course_lib.errors import CourseError
from course_lib.specs.checking import known, whole
from course_lib.specs.recipe import GRADIENTS, MODEL_STATES, OPTIMIZER_STATES

SHARDED = {
    "ddp": (),
    "zero1": (OPTIMIZER_STATES,),
    "zero2": (OPTIMIZER_STATES, GRADIENTS),
    "zero3": MODEL_STATES,
    "fsdp": MODEL_STATES,
    "hsdp": MODEL_STATES,
}
BY_UNITS = ("fsdp", "hsdp")
# What leaves the GPU for the host's memory.
OFFLOADED = {"none": (), "optimizer": (OPTIMIZER_STATES,), "all": MODEL_STATES}
WRAP_PARAMETERS = re.compile(r"([1-9]\d*)-params")


@dataclass(frozen=True)
class Strategy:
    """How a job is spread over `gpus` ranks, one to a GPU.

    `name` is one of SHARDED. `wrap` says what is gathered at a time: 'layer', 'model', or as many
    modules as hold N parameters, written '100000000-params'. `offload` is one of OFFLOADED.
    `reshard_after_forward` may be a number n of ranks under fsdp and hsdp: after forward a rank
    keeps the 1/n of a unit's parameters that it and its neighbours share.

    Raises CourseError for names and numbers that are none, for HSDP on nodes that are not full, for
    a number of neighbours that does not divide the ranks, and for offloading parameters that are
    not sharded.
    """

    name: str = "ddp"
    gpus: int = 1
    gpus_per_node: int = 8
    wrap: str = "layer"
    reshard_after_forward: bool | int = True
    offload: str = "none"

    def __post_init__(self) -> None:
        known("strategy called", self.name, SHARDED)
        known("offload called", self.offload, OFFLOADED)
        whole("gpus", self.gpus)
        whole("gpus_per_node", self.gpus_per_node)
        if self.name == "hsdp" and self.gpus % self.gpus_per_node:
            raise CourseError(
                f"hsdp shards within a node and replicates over nodes, and {self.gpus} GPUs do not "
                f"fill nodes of {self.gpus_per_node}: give another number of GPUs, or take fsdp."
            )
        self._check_reshard()
        if self.offload == "all" and SHARDED[self.name] != MODEL_STATES:
            raise CourseError(
                f"{self.name} needs its parameters whole on the GPU, so not all can be offloaded: "
                "offload the optimizer alone, or take zero3 or fsdp."
            )
        if self.wrap not in ("layer", "model") and not WRAP_PARAMETERS.fullmatch(str(self.wrap)):
            raise CourseError(
                f"wrap is {self.wrap!r}: give 'layer', 'model', or a number of parameters such as "
                "'100000000-params'."
            )

    def _check_reshard(self) -> None:
        near = self.reshard_after_forward
        if isinstance(near, bool):
            return
        whole("reshard_after_forward", near)
        if self.name not in BY_UNITS:
            raise CourseError(
                f"reshard_after_forward is {near}, a number of ranks, which fsdp and hsdp alone "
                f"take, not {self.name}: give True or False."
            )
        if self.shard_ranks % near:
            raise CourseError(
                f"reshard_after_forward is {near}, and parameters are sharded among "
                f"{self.shard_ranks} ranks: give a number that divides these, or True or False."
            )

    @property
    def sharded(self) -> tuple[str, ...]:
        """The categories of model states of which each rank holds a shard; the rest is whole."""
        return SHARDED[self.name]

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The categories of model states that are held in the host's memory."""
        return OFFLOADED[self.offload]

    @property
    def shard_ranks(self) -> int:
        """Over how many ranks a shard's whole is divided: 1 where nothing is sharded."""
        if not self.sharded:
            return 1
        return self.gpus_per_node if self.name == "hsdp" else self.gpus

    @property
    def near_ranks(self) -> int:
        """How many ranks together have what is left of a unit's parameters after forward."""
        near = self.reshard_after_forward
        return self.shard_ranks if isinstance(near, bool) else near

    @property
    def replicas(self) -> int:
        """How many times the job holds everything that it shards: under ddp, once a rank."""
        return self.gpus // self.shard_ranks
