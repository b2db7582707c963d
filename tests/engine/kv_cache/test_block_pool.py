"""BlockPool and BlockPools: allocation, reference counts, the prefix cache and its eviction."""

import pytest
import torch
from sensorium.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, BlockPools
from sensorium.models.interface import CacheSpec

FULL, WINDOW = CacheSpec("full", 1, 8, torch.float32), CacheSpec("window", 1, 8, torch.float32, 3)


def test_blocks_grow_and_shrink_in_all_groups_together():
    kv = BlockPools([FULL] * 2, [5, 5], block_size=4)
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


def test_freeing_a_block_twice_fails_an_assertion():
    pool = BlockPool(2, 2)
    taken = pool.allocate(2)
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken)
    with pytest.raises(AssertionError):
        pool.allocate(3)


def test_hashed_blocks_are_cached_found_and_shared():
    pool = BlockPool(4, 4)
    first = pool.allocate(3)
    for block, key in zip(first, (b"a", b"b"), strict=False):
        pool.cache_block(block, key)
    pool.free(first)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    found = pool.find_cached_prefix([b"a", b"b", b"c"])
    assert found == list(first[:2])
    pool.touch(found)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.touch(found)
    assert pool.is_shared(found[0])
    pool.free(found)
    assert pool.num_free == 2, "the other sequence still uses them"
    pool.free(found)
    assert pool.find_cached_prefix([b"x", b"a"]) == [], "a cached prefix starts with the first block"


def test_least_recently_used_blocks_are_evicted_first_and_last_blocks_before_first_ones():
    pool = BlockPool(4, 4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, key in zip((*old, *new), (b"a", b"b", b"c", b"d"), strict=True):
        pool.cache_block(block, key)
    pool.free(old)
    pool.free(new)
    pool.touch(pool.find_cached_prefix([b"a"]))  # used again
    pool.free([old[0]])
    pool.allocate(1)
    assert [len(pool.find_cached_prefix([key])) for key in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]
    pool.allocate(1)
    assert [len(pool.find_cached_prefix([key])) for key in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 0]
    assert pool.evictions == 2


def test_no_more_than_max_cached_blocks_are_cached():
    pool = BlockPool(4, 1)
    taken = pool.allocate(2)
    pool.cache_block(taken[0], b"a")
    pool.cache_block(taken[1], b"b")
    pool.free(taken)
    assert pool.num_cached == 1
    assert pool.find_cached_prefix([b"a"]) == [taken[0]]
    assert pool.find_cached_prefix([b"b"]) == []


def test_of_two_blocks_with_one_hash_the_first_is_found():
    pool = BlockPool(3, 3)
    one, two = pool.allocate(2)
    pool.cache_block(one, b"a")
    pool.cache_block(two, b"a")
    assert pool.find_cached_prefix([b"a"]) == [one]
    pool.remove_hash(one)
    assert pool.find_cached_prefix([b"a"]) == []
    pool.free([two])
    assert pool.num_cached == 0


def test_null_blocks_are_ignored():
    pool = BlockPool(3, 3)
    taken = pool.allocate(2)
    pool.cache_block(taken[1], b"b")
    pool.free((NULL_BLOCK, taken[0]))
    assert list(pool.find_cached([b"a", b"b"])) == [NULL_BLOCK, taken[1]]
    pool.touch((NULL_BLOCK, taken[1]))
    assert pool.is_shared(taken[1])
    assert pool.num_free == 2


def test_capacity_is_unbounded_where_all_groups_have_windows():
    assert BlockPools([WINDOW], [5], 4).capacity > 1 << 40
    assert BlockPools([WINDOW, FULL], [5, 9], 4).capacity == 36
