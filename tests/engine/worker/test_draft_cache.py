"""The cache of what drafts in the worker: blocks are taken from the sequence that was used longest ago, and cleared."""

import torch
from sensorium.engine.worker.draft_cache import DraftCache
from sensorium.models.interface import CacheSpec

SPECS = [CacheSpec("full", 2, 4, torch.float32), CacheSpec("window", 2, 4, torch.float32, 8)]


def test_blocks_move_to_the_sequence_that_needs_them():
    cache = DraftCache(SPECS, 4, 2, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache.tensors) == 4 * sum(spec.block_bytes(2) for spec in SPECS)
    first, second = cache.grow("a", 3), cache.grow("b", 4)
    assert first is not None
    assert second is not None
    assert len(set(first.blocks + second.blocks)) == 4
    assert cache.grow("a", 4) is first
    assert cache.get("b") is second
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    third = cache.grow("c", 1)
    assert third is not None
    assert cache.get("a") is None
    assert cache.get("b") is second
    assert all(not tensor[:, third.blocks].any() for tensor in cache.tensors)
    assert cache.grow("d", 8) is not None
    assert [cache.get(name) for name in "abc"] == [None] * 3


def test_what_is_kept_or_too_long_finds_no_room():
    cache = DraftCache(SPECS, 4, 2, torch.device("cpu"))
    rows = cache.grow("a", 6)
    assert cache.grow("b", 4, keep=("a", "b")) is None
    assert cache.get("a") is rows
    assert cache.grow("a", 9) is None
    assert cache.get("a") is rows
    cache.free("a")
    cache.free("unknown")
    assert cache.grow("b", 8, keep=("a",)) is not None


def test_cleared_blocks_are_allocated_again():
    cache = DraftCache(SPECS, 4, 2, torch.device("cpu"))
    assert cache.grow("a", 8) is not None
    cache.clear()
    assert not cache.tensors
    cache.allocate()
    assert cache.get("a") is None
    assert cache.grow("b", 8) is not None
