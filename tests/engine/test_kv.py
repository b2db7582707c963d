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
    blocks = kv.grow(kv.empty, [9, 9])
    assert [len(held) for held in blocks] == [3, 3]
    assert kv.grow(blocks, [12, 12]) is blocks
    assert kv.grow(kv.empty, [13, 13]) is None
    more = kv.grow(blocks, [13, 13])
    assert all(new[:3] == old for new, old in zip(more, blocks, strict=True))
    assert kv.num_free == 1
    assert [len(held) for held in kv.shrink(more, [1, 1])] == [1, 1]
    assert kv.num_free == 4
    assert kv.capacity == 20


def test_freeing_twice_is_a_bug_that_shows():
    pool = BlockPool(2, 2)
    taken = pool.allocate(2)
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken)
    with pytest.raises(AssertionError):
        pool.allocate(3)


def test_full_blocks_are_kept_found_and_shared():
    pool = BlockPool(4, 4)
    first = pool.allocate(3)
    for block, key in zip(first, (b"a", b"b"), strict=False):
        pool.name(block, key)
    pool.free(first)
    assert (pool.num_free, pool.num_kept) == (4, 2)
    found = pool.find([b"a", b"b", b"c"])
    assert found == list(first[:2])
    pool.share(found)
    assert (pool.num_free, pool.num_kept) == (2, 0)
    pool.share(found)
    assert pool.is_shared(found[0])
    pool.free(found)
    assert pool.num_free == 2, "the other one still has them"
    pool.free(found)
    assert pool.find([b"x", b"a"]) == [], "a chain is known from its beginning or not at all"


def test_the_least_recently_used_blocks_go_first_ends_before_beginnings():
    pool = BlockPool(4, 4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, key in zip((*old, *new), (b"a", b"b", b"c", b"d"), strict=True):
        pool.name(block, key)
    pool.free(old)
    pool.free(new)
    pool.share(pool.find([b"a"]))  # used again
    pool.free([old[0]])
    pool.allocate(1)
    assert [len(pool.find([key])) for key in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]
    pool.allocate(1)
    assert [len(pool.find([key])) for key in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 0]
    assert pool.evictions == 2


def test_no_more_blocks_are_kept_than_allowed():
    pool = BlockPool(4, 1)
    taken = pool.allocate(2)
    pool.name(taken[0], b"a")
    pool.name(taken[1], b"b")
    pool.free(taken)
    assert pool.num_kept == 1
    assert pool.find([b"a"]) == [taken[0]]
    assert pool.find([b"b"]) == []


def test_of_two_blocks_alike_the_first_is_found():
    pool = BlockPool(3, 3)
    one, two = pool.allocate(2)
    pool.name(one, b"a")
    pool.name(two, b"a")
    assert pool.find([b"a"]) == [one]
    pool.forget(one)
    assert pool.find([b"a"]) == []
    pool.free([two])
    assert pool.num_kept == 0


def test_caches_have_the_planned_size_and_start_at_zero():
    caches = allocate_caches([SMALL, LARGE], 7, 4, torch.device("cpu"))
    assert [tuple(cache.shape) for cache in caches] == [(2, 7, 4, 1, 8), (2, 7, 4, 2, 16)]
    assert sum(cache.nbytes for cache in caches) == 7 * bytes_per_block([SMALL, LARGE], 4)
    assert all(not cache.any() and cache.data_ptr() % 64 == 0 for cache in caches)
