"""Blocks are handed out once, come back once, and cost what the closed form says."""

import pytest
import torch
from sensorium.engine.kv import HOLE, BlockPool, CacheGroup, KVBlocks, PoolSpec, allocate_caches, bytes_per_block, group_layers
from sensorium.models.interface import CacheSpec

SMALL, LARGE = CacheSpec("full", 1, 8, torch.float32), CacheSpec("full", 2, 16, torch.bfloat16)
LATENT = CacheSpec("latent", 1, 24, torch.float32)


def test_layers_of_equal_spec_share_a_group():
    groups = group_layers([SMALL, LARGE, CacheSpec("full", 1, 8, torch.float32)])
    assert [(group.spec, group.layers) for group in groups] == [(SMALL, (0, 2)), (LARGE, (1,))]


def test_grow_and_shrink_in_all_groups_together():
    kv = KVBlocks([PoolSpec(5)] * 2, block_size=4)
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
    caches = allocate_caches([SMALL, LARGE, SMALL, LATENT], (7, 3, 2), 4, torch.device("cpu"))
    assert [tuple(cache.shape) for cache in caches] == [(2, 7, 4, 1, 8), (2, 3, 4, 2, 16), (2, 7, 4, 1, 8), (1, 2, 4, 1, 24)]
    assert sum(cache.nbytes for cache in caches) == 7 * 2 * 256 + 3 * 512 + 2 * 384
    assert bytes_per_block([SMALL, LARGE, LATENT], 4) == 256 + 512 + 384
    assert all(not cache.any() and cache.data_ptr() % 64 == 0 for cache in caches)


def test_holes_are_nobodys():
    pool = BlockPool(3, 3)
    taken = pool.allocate(2)
    pool.name(taken[1], b"b")
    pool.free((HOLE, taken[0]))
    assert list(pool.find_each([b"a", b"b"])) == [HOLE, taken[1]]
    pool.share((HOLE, taken[1]))
    assert pool.is_shared(taken[1])
    assert pool.num_free == 2


@pytest.mark.parametrize(("window", "rows", "block"), [(1, 1, 4), (4, 1, 4), (5, 1, 4), (7, 3, 4), (16, 10, 4), (3, 9, 5)])
def test_blocks_that_a_window_touches(window, rows, block):
    group = CacheGroup(CacheSpec("window", 1, 8, torch.float32, window), (0, 1))
    touched = [(at + rows - 1) // block - max(0, at - window + 1) // block + 1 for at in range(100)]
    assert group.blocks(10_000, rows, block) == max(touched)
    assert group.blocks(3, rows, block) == 1
    assert group.block_bytes(block) == block * 128


def test_sequences_without_an_end_of_room_where_all_is_windows():
    assert KVBlocks([PoolSpec(5, "window", 3)], 4).capacity > 1 << 40
    assert KVBlocks([PoolSpec(5, "window", 3), PoolSpec(9)], 4).capacity == 36
