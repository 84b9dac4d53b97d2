"""The flat space against one buffer made by hand."""

import pytest
import torch
from torch import nn

from course_lib.errors import CourseError
from course_lib.sharded.flat import Flat

SHAPES = {  # of each group's parameters
    "one": [[(2, 3), (5,), (1,), (4, 4)]],
    "groups": [[(7,), (3, 3)], [(2,)], [(5, 1), (1,)]],
    "less than ranks": [[(1,), (2,)]],
    "a group without any": [[(3,)], [], [(4,)]],
    "without elements": [[(0, 3), (4,), (0,)]],
}


def numbered(name: str) -> list[list[nn.Parameter]]:
    """Parameters of which no two elements are alike, and none is 0."""
    count, groups = 1, []
    for shapes in SHAPES[name]:
        groups.append([])
        for shape in shapes:
            elements = torch.Size(shape).numel()
            values = torch.arange(count, count + elements, dtype=torch.float32)
            groups[-1].append(nn.Parameter(values.view(shape)))
            count += elements
    return groups


@pytest.mark.parametrize("bucket_bytes", [1, 40, 10_000])
@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", SHAPES)
def test_every_element_has_one_owner_and_one_place(name, world_size, bucket_bytes):
    groups = numbered(name)
    flats = [Flat(groups, rank, world_size, bucket_bytes) for rank in range(world_size)]
    shards = [flat.shard() for flat in flats]
    values = torch.cat([p.detach().flatten() for group in groups for p in group[::-1]])
    size = -(-len(values) // world_size)
    assert {len(shard) for shard in shards} == {size} == {flat.shard_size for flat in flats}

    # What an all_gather makes of each bucket, side by side, is the buffer with its padding.
    buckets = flats[0].buckets
    wholes = [torch.cat([shard[bucket.in_shard] for shard in shards]) for bucket in buckets]
    padded = torch.cat([values, torch.zeros(world_size * size - len(values))])
    assert torch.equal(torch.cat(wholes), padded)

    for flat in flats:  # the same buckets on each, whose parts are all that is not padding
        assert [bucket.size for bucket in flat.buckets] == [len(whole) for whole in wholes]
        for bucket, whole in zip(flat.buckets, wholes, strict=True):
            filled = torch.zeros(bucket.size)
            for part in bucket.parts:
                filled[part.place] += part.of(part.parameter)
            assert torch.equal(filled, whole)
    limit = max(bucket_bytes, 4 * world_size)
    assert all(4 * bucket.size <= limit for bucket in buckets)
    assert all(4 * (bucket.size + world_size) > limit for bucket in buckets[:-1])

    for index, group in enumerate(groups):  # in order, each as one stretch of every shard
        own = torch.cat([shard[f.stretches[index]] for f, shard in zip(flats, shards, strict=True)])
        expected = {value for p in group for value in p.flatten().tolist()}
        padding = {0.0} if index == len(groups) - 1 else set()
        assert set(own.tolist()) - padding == expected
        assert len(own[own > 0]) == len(expected)


def test_parts_are_views_through_which_a_parameter_is_written():
    [[parameter]] = groups = [[nn.Parameter(torch.zeros(2, 3))]]
    for bucket in Flat(groups, 0, 1, bucket_bytes=8).buckets:
        for part in bucket.parts:
            part.of(parameter).fill_(part.within.start)
    assert parameter.tolist() == [[0, 0, 2], [2, 4, 4]]


def test_what_cannot_be_laid_flat_is_refused():
    with pytest.raises(CourseError, match="no trained parameter"):
        Flat([[], []], 0, 2, 100)
    two = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    with pytest.raises(CourseError, match="torch.bfloat16, torch.float32"):
        Flat([two], 0, 2, 100)
    with pytest.raises(CourseError, match="not contiguous"):
        Flat([[nn.Parameter(torch.zeros(2, 3).T)]], 0, 2, 100)
