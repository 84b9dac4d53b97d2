"""How a buffer of so many elements is cut for N ranks: the largest shard, which padding makes of
all of them wherever a collective needs them equal."""

from course_lib.specs.tensors import TensorSpec


def flat_shard(elements: int, ranks: int) -> int:
    """Elements of a rank's shard of a flat buffer: ceil(elements / ranks)."""
    return -(-elements // ranks)


def row_shard(tensor: TensorSpec, ranks: int) -> int:
    """Elements of rank 0's shard of a tensor that is cut along its first dimension.

    ceil(rows / ranks) rows. The last ranks of a short tensor hold fewer rows, or none.
    """
    rows = tensor.shape[0]
    return flat_shard(rows, ranks) * (tensor.numel // rows)
