"""Blocks are handed out once, come back once, and cost what the closed form says."""

import pytest
import torch
from sensorium.engine.kv import BlockPool, KVBlocks, allocate_caches, bytes_per_block, group_layers
from sensorium.models.interface import CacheSpec

SMALL, LARGE = CacheSpec("full", 1, 8, torch.float32), CacheSpec("full", 2, 16, torch.bfloat16)


def test_layers_of_equal_spec_share_a_group():
    groups = group_layers([SMALL, LARGE, CacheSpec("full", 1, 8, torch.float32)])
    assert [(group.spec, group.layers) for group in groups] == [(SMALL, (0, 2)), (LARGE, (1,))]


def test_grow_and_shrink_in_all_groups_together():
    kv = KVBlocks(2, num_blocks=5, block_size=4)
    blocks = kv.grow(kv.empty, 9)
    assert [len(held) for held in blocks] == [3, 3]
    assert kv.grow(blocks, 12) is blocks
    assert kv.grow(kv.empty, 13) is None
    more = kv.grow(blocks, 13)
    assert all(new[:3] == old for new, old in zip(more, blocks, strict=True))
    assert kv.num_free == 1
    assert [len(held) for held in kv.shrink(more, 1)] == [1, 1]
    assert kv.num_free == 4
    assert kv.capacity == 20


def test_freeing_twice_is_a_bug_that_shows():
    pool = BlockPool(2)
    taken = pool.allocate(2)
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken)
    with pytest.raises(AssertionError):
        pool.allocate(3)


def test_caches_have_the_planned_size_and_start_at_zero():
    caches = allocate_caches([SMALL, LARGE], 7, 4, torch.device("cpu"))
    assert [tuple(cache.shape) for cache in caches] == [(2, 7, 4, 1, 8), (2, 7, 4, 2, 16)]
    assert sum(cache.nbytes for cache in caches) == 7 * bytes_per_block([SMALL, LARGE], 4)
    assert all(not cache.any() and cache.data_ptr() % 64 == 0 for cache in caches)
