"""Buckets: gradients put together, so that DDP all-reduces a few large buffers, not many small.

Backward finishes gradients in the reverse of the order in which forward used the parameters, the
head's first, the embedding's last. DDP fills a bucket in that order. A bucket closes, and its
all-reduce starts, when its size reaches the cap; the tensor that brings it there is never split, so
a bucket may be larger than the cap. The first bucket has a smaller cap, so that communication
starts early.

In its first iteration DDP does not know that order yet: it makes one bucket of all gradients, notes
the order in which they became ready, and makes its buckets anew before the second.

Source: PyTorch, torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size,
rebuild_buckets) and torch/nn/parallel/distributed.py.
"""

from collections.abc import Sequence
from functools import lru_cache

from course_lib.specs import ModelSpec, TensorSpec
from course_lib.specs.checking import whole

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
UNDER_WAY = 2  # reduce_scatters at a time, in this course's zero2 and zero3

# The modules of a block in the order in which forward uses them, for all architectures at once.
# (Models list them in the order in which they were made, Llama's norms last.)
USED = (
    "input_layernorm",
    *("q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "query_key_value"),
    *("q_layernorm", "k_layernorm", "dense", "o_proj"),
    *("post_attention_layernorm", "pre_feedforward_layernorm"),
    *("gate", "gate_proj", "fc1", "dense_h_to_4h"),
    *("up_proj", "down_proj", "fc2", "dense_4h_to_h", "post_feedforward_layernorm"),
    *("w1", "w3", "w2"),  # an expert's
)


def buckets(sizes: Sequence[int], cap: int, first_cap: int | None = None) -> list[list[int]]:
    """Put tensors of `sizes` bytes into buckets, in the order given: lists of their indices.

    A bucket closes when it holds at least `cap` bytes, the first one `first_cap` (by default the
    same). DDP makes the buckets of each dtype by themselves.
    """
    whole("cap", cap)
    whole("first_cap", first_cap := cap if first_cap is None else first_cap)
    made: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        made[-1].append(index)
        filled += size
        if filled >= (cap if len(made) > 1 else first_cap):
            made.append([])
            filled = 0
    return [bucket for bucket in made if bucket]


def caps(cap: int, first_cap: int | None) -> tuple[int, int]:
    """The caps of a job's buckets and of its first, where None was given for that.

    As in DDP, a first bucket has a cap of its own only where the others have the default.
    """
    if first_cap is None:
        first_cap = FIRST_BUCKET_BYTES if cap == BUCKET_BYTES else cap
    return cap, first_cap


def flat_piece(bucket_bytes: int, itemsize: int, ranks: int) -> int:
    """How many elements of each rank's shard a full bucket of zero1 or zero2 has: at least one.

    `itemsize` is that of the parameters; gradients are cut in the same places.
    """
    whole("bucket_bytes", bucket_bytes)
    return max(bucket_bytes // itemsize // ranks, 1)


@lru_cache(maxsize=64)
def in_use_order(model: ModelSpec) -> tuple[TensorSpec, ...]:
    """The parameter tensors in the order in which forward uses them.

    A bare count is one flat tensor, as if it were a block.
    """
    if model.is_bare:
        return (TensorSpec("parameters", (model.count,), layer=0),)
    tensors = model.tensors()
    blocks = [tensor for tensor in tensors if tensor.layer is not None]
    stem = tensors.index(blocks[0])
    end = tensors[stem + len(blocks) :]
    return (*tensors[:stem], *sorted(blocks, key=_use), *end)


def _use(tensor: TensorSpec) -> tuple[int, int, int]:
    module = tensor.name.split(".")[-2]
    place = USED.index(module) if module in USED else 0  # GPT-2 lists its modules as it uses them
    expert = -1 if tensor.expert is None else tensor.expert  # after all else in a block
    return tensor.layer, expert, place
