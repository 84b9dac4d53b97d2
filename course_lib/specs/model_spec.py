"""What a model is to a ledger: its sizes, and from them every parameter tensor.

Parameters are counted from the tensors, never from a formula of their own, so that a count, a
shard and a receipt can only agree. The one exception is a bare count, such as the ZeRO paper's
7.5B model: a number of parameters about whose tensors nothing is known.
"""

from dataclasses import dataclass
from functools import lru_cache

from course_lib.errors import CourseError
from course_lib.specs.checking import known, whole
from course_lib.specs.tensors import ARCHITECTURES, Parts, TensorSpec

BARE = "bare"
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
)
MOST_LAYERS = 10_000  # far above any model, and low enough to list every tensor at once
MOST_EXPERTS = 1_000


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, or a bare count of parameters.

    `family` is the `model_type` of a Hugging Face config.json, or 'bare'. `max_positions` is the
    size of GPT-2's table of learned positions, 0 where positions are not learned.
    `num_experts` is 0 in a dense model; in a mixture of experts each token passes through
    `experts_per_token` of them. A bare count has `count` parameters and no sizes.
    """

    name: str
    family: str
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    tied_embeddings: bool = False
    max_positions: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        known("model family", self.family, (*ARCHITECTURES, BARE))
        if self.is_bare:
            whole(f"The parameter count of {self.name}", self.count)
            return
        for size in SIZES:
            most = MOST_LAYERS if size == "num_layers" else 10**9
            whole(f"{size} of {self.name}", getattr(self, size), most=most)
        if self.num_heads % self.num_kv_heads:
            raise CourseError(
                f"{self.name} has {self.num_heads} query heads, which {self.num_kv_heads} "
                "key/value heads do not divide: give each key/value head the same number of them."
            )
        if self.family == "gpt2":
            whole(f"max_positions of {self.name}", self.max_positions, most=10**9)
        if self.family == "mixtral":
            whole(f"num_experts of {self.name}", self.num_experts, most=MOST_EXPERTS)
            whole(f"experts_per_token of {self.name}", self.experts_per_token, 1, self.num_experts)

    @property
    def is_bare(self) -> bool:
        """Is this a count of parameters alone?"""
        return self.family == BARE

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every parameter tensor, in the order of `named_parameters()`; () for a bare count."""
        return () if self.is_bare else _tensors(self)

    def block(self) -> tuple[TensorSpec, ...]:
        """The tensors of one block, named from within it; all blocks are alike."""
        return () if self.is_bare else tuple(_parts(self).block)

    @property
    def blocks(self) -> str:
        """The name of the module that has the blocks; '' for a bare count."""
        return "" if self.is_bare else _parts(self).blocks

    @property
    def parameters(self) -> int:
        """Number of parameters; a tensor that is used twice counts once."""
        return self.count or _numel(self)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: fewer in a mixture of experts alone."""
        if not self.num_experts:
            return self.parameters
        # Experts are alike, so any k of them will do: count the first k.
        return sum(
            tensor.numel
            for tensor in self.tensors()
            if tensor.expert is None or tensor.expert < self.experts_per_token
        )


def _parts(spec: ModelSpec) -> Parts:
    return ARCHITECTURES[spec.family](spec)


@lru_cache(maxsize=64)
def _tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    parts = _parts(spec)
    blocks = [
        TensorSpec(f"{parts.blocks}.{layer}.{tensor.name}", tensor.shape, layer, tensor.expert)
        for layer in range(spec.num_layers)
        for tensor in parts.block
    ]
    return (*parts.stem, *blocks, *parts.end)


@lru_cache(maxsize=64)
def _numel(spec: ModelSpec) -> int:
    return sum(tensor.numel for tensor in _tensors(spec))
