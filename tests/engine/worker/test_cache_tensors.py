"""KV-cache tensors have the planned shapes and sizes."""

import torch
from sensorium.engine.worker.cache_tensors import allocate_caches
from sensorium.models.interface import CacheSpec

SMALL, LARGE = CacheSpec("full", 1, 8, torch.float32), CacheSpec("full", 2, 16, torch.bfloat16)
LATENT = CacheSpec("latent", 1, 24, torch.float32)


def test_caches_have_the_planned_size_are_aligned_and_zeroed():
    caches = allocate_caches([SMALL, LARGE, SMALL, LATENT], (7, 3, 2), 4, torch.device("cpu"))
    assert [tuple(cache.shape) for cache in caches] == [(2, 7, 4, 1, 8), (2, 3, 4, 2, 16), (2, 7, 4, 1, 8), (1, 2, 4, 1, 24)]
    assert sum(cache.nbytes for cache in caches) == 7 * 2 * 256 + 3 * 512 + 2 * 384
    assert all(not cache.any() and cache.data_ptr() % 64 == 0 for cache in caches)
