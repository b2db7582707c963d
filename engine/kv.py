"""Blocks of key/value memory, by groups of layers with equal CacheSpec. Knows no request and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..models.interface import CacheSpec

Blocks = tuple[tuple[int, ...], ...]  # per group, physical block of each logical block


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache alike and so share one block table."""

    spec: CacheSpec
    layers: tuple[int, ...]


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Layers of equal spec, groups in order of first appearance."""
    layers: dict[CacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    return tuple(CacheGroup(spec, tuple(ids)) for spec, ids in layers.items())


def bytes_per_block(specs: Sequence[CacheSpec], block_size: int) -> int:
    """Bytes of one block over all layers."""
    return block_size * sum(spec.bytes_per_token for spec in specs)


def allocate_caches(specs: Sequence[CacheSpec], num_blocks: int, block_size: int, device: torch.device) -> list[Tensor]:
    """One zeroed `[2, num_blocks, block_size, kv_heads, head_dim]` per layer. On a CPU, pages cost memory once written."""
    shapes = [(2, num_blocks, block_size, spec.kv_heads, spec.head_dim) for spec in specs]
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=spec.dtype, device=device) for shape, spec in zip(shapes, specs, strict=True)]
    return [_lazy_zeros(shape, spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, align: int = 64) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + align, dtype=np.uint8)  # calloc: the kernel hands out zero pages on first touch
    start = -raw.ctypes.data % align
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


class BlockPool:
    """The free blocks of one group."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        assert count <= len(self._free), "allocate() without asking num_free first"
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            assert not self._used[block], f"block {block} was handed out twice"
            self._used[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._used[block], f"block {block} was freed twice"
            self._used[block] = 0
            self._free.append(block)


class KVBlocks:
    """One pool per group; a sequence's blocks grow and shrink in all groups together."""

    def __init__(self, num_groups: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = num_blocks * block_size  # tokens one sequence could hold
        self.pools = tuple(BlockPool(num_blocks) for _ in range(num_groups))
        self.empty: Blocks = ((),) * num_groups

    @property
    def num_free(self) -> int:
        return min(pool.num_free for pool in self.pools)

    def grow(self, blocks: Blocks, num_tokens: int) -> Blocks | None:
        """Blocks for `num_tokens` tokens, the old ones first, or None when a pool has too few."""
        need = -(-num_tokens // self.block_size)
        if all(len(held) >= need for held in blocks):
            return blocks
        if any(need - len(held) > pool.num_free for held, pool in zip(blocks, self.pools, strict=True)):
            return None
        return tuple(held + pool.allocate(max(0, need - len(held))) for held, pool in zip(blocks, self.pools, strict=True))

    def shrink(self, blocks: Blocks, num_tokens: int) -> Blocks:
        """The blocks that `num_tokens` tokens still need; the rest are free again."""
        keep = -(-num_tokens // self.block_size)
        for held, pool in zip(blocks, self.pools, strict=True):
            pool.free(held[keep:])
        return tuple(held[:keep] for held in blocks)
