"""One real rank of many: its memory is true, its numbers are not.

    with one_of_many(64):
        ...  # a training step, as rank 0 of 64

Of torch's "fake" process group one member is there. Its collectives return at once, and give it its
own data in place of what the others would have sent. So it allocates, cuts, gathers and frees what
it would among real ranks, to the byte, and nothing that it computes means anything.
"""

import contextlib
import importlib
from collections.abc import Iterator

import torch.distributed as dist

from course_lib.errors import CourseError
from course_lib.specs.checking import whole

FAKE = "torch.testing._internal.distributed.fake_pg"  # registers the backend


@contextlib.contextmanager
def one_of_many(world_size: int, rank: int = 0) -> Iterator[None]:
    """In here this process is rank `rank` of `world_size`.

    Errors: CourseError where it is a rank already, or where there is no such rank.
    """
    whole("world_size", world_size, least=1)
    whole("rank", rank, least=0)
    if rank >= world_size:
        raise CourseError(
            f"one_of_many was given rank {rank} of {world_size}: ranks count from 0, so give "
            f"{world_size - 1} at most."
        )
    if dist.is_initialized():
        raise CourseError(
            f"one_of_many was to make this process one of {world_size} ranks, and it is one of "
            f"{dist.get_world_size()} already: use it outside of ranks.run."
        )
    store = importlib.import_module(FAKE).FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
