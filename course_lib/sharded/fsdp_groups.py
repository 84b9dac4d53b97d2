"""Among whom FSDP shards: a mesh of ranks, in one dimension or two.

replicas ↓   shards →
0  1  2  3      under hybrid sharding each row has the whole model, and the ranks of a column
4  5  6  7      have the same rows of each parameter
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_lib.errors import CourseError
from course_lib.specs.checking import whole


@dataclass(frozen=True)
class Groups:
    """This rank's process groups: it has the same model as `shard` together, the same rows as
    `replicas`, and after forward shares whole parameters with `near`. None where there is none."""

    shard: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    near: dist.ProcessGroup | None


def groups(mesh: DeviceMesh | None, reshard_after_forward: bool | int) -> Groups:
    """Those of `mesh`, by default of all ranks, and of `reshard_after_forward` ranks.

    Errors: CourseError where a mesh is none of all ranks, or a number does not divide its shards.
    """
    world_size = dist.get_world_size()
    if mesh is None:
        mesh = init_device_mesh("cpu", (world_size,))
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2 or mesh.size() != world_size:
        given = f"of shape {tuple(mesh.shape)}" if isinstance(mesh, DeviceMesh) else repr(mesh)
        raise CourseError(
            f"FSDP was given a mesh {given}, and expects a DeviceMesh of all {world_size} ranks in "
            "one dimension, of shards, or two, replicas and then shards: make it by "
            "init_device_mesh."
        )
    shard = mesh.get_group(mesh.ndim - 1)
    near = None
    if not isinstance(reshard_after_forward, bool):
        whole("reshard_after_forward", reshard_after_forward)
        near = _near(mesh, reshard_after_forward)
    return Groups(shard, mesh.get_group(0) if mesh.ndim == 2 else None, near)


def _near(mesh: DeviceMesh, count: int) -> dist.ProcessGroup:
    """The `count` ranks of this rank's shard group that are next to each other, this among them."""
    lines = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))  # a shard group in each
    if lines.shape[1] % count:
        raise CourseError(
            f"reshard_after_forward is {count}, and parameters are sharded among {lines.shape[1]} "
            "ranks: give a number that divides these."
        )
    own, _ = dist.new_subgroups_by_enumeration(lines.reshape(-1, count).tolist())
    return own
