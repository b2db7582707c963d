"""Blocks of key/value memory, by groups of layers with equal CacheSpec. Knows no request and no model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from ..models.interface import CacheSpec

Blocks = tuple[tuple[int, ...], ...]  # per group, physical block of each logical block
HOLE = -1  # in place of a block that no later token reads, behind the window of its group


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache alike and so share one block table."""

    spec: CacheSpec
    layers: tuple[int, ...]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        return len(self.layers) * block_size * self.spec.bytes_per_token

    def blocks(self, length: int, rows: int, block_size: int) -> int:
        """That a sequence of `length` tokens holds at most, when a step computes at most `rows` of them."""
        whole = -(-length // block_size)
        if self.spec.window is None:
            return whole
        return min(whole, (self.spec.window + rows + block_size - 3) // block_size + 1)  # wherever in a block the window begins

    def most_blocks(self, seqs: int, length: int, rows: int, block_size: int) -> int:
        """That so many sequences hold: few have more than a row to compute at the same time."""
        one = self.blocks(length, rows, block_size)
        if self.spec.window is None:
            return seqs * one
        return min(seqs * one, seqs * self.blocks(length, 1, block_size) + 2 * -(-rows // block_size))


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Layers of equal spec, groups in order of first appearance."""
    layers: dict[CacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    return tuple(CacheGroup(spec, tuple(ids)) for spec, ids in layers.items())


def bytes_per_block(specs: Sequence[CacheSpec], block_size: int) -> int:
    """Bytes of one block over all layers."""
    return block_size * sum(spec.bytes_per_token for spec in specs)


def allocate_caches(
    specs: Sequence[CacheSpec], num_blocks: Sequence[int], block_size: int, device: torch.device
) -> list[Tensor]:
    """One zeroed `[planes, num_blocks, block_size, kv_heads, width]` per layer. On a CPU, pages cost memory once written.

    `num_blocks`: of each group.
    """
    counts = [num_blocks[group] for group in group_of_layer(group_layers(specs))]
    shapes = [(spec.planes, count, block_size, spec.kv_heads, spec.width) for spec, count in zip(specs, counts, strict=True)]
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=spec.stored, device=device) for shape, spec in zip(shapes, specs, strict=True)]
    return [_lazy_zeros(shape, spec.stored) for shape, spec in zip(shapes, specs, strict=True)]


def group_of_layer(groups: Sequence[CacheGroup]) -> list[int]:
    """Index of the group of each layer, in order of layers."""
    return [index for _, index in sorted((layer, index) for index, group in enumerate(groups) for layer in group.layers)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, align: int = 64) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + align, dtype=np.uint8)  # calloc: the kernel hands out zero pages on first touch
    start = -raw.ctypes.data % align
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


class BlockPool:
    """The blocks of one group. Each is in use by so many sequences, or kept (nobody's, its content known), or blank.

    Args:
        num_blocks: all there are.
        most_kept: kept blocks beyond this many are made blank, the least recently used first.
    """

    def __init__(self, num_blocks: int, most_kept: int) -> None:
        self.num_blocks, self._most_kept = num_blocks, most_kept
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self.evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._blank) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Blank blocks, made from kept ones where need be."""
        assert count <= self.num_free, "allocate() without asking num_free first"
        while len(self._blank) < count:
            self._evict()
        taken = tuple(self._blank.pop() for _ in range(count))
        for block in taken:
            assert not self._users[block], f"block {block} was handed out twice"
            self._users[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """One user less for each; the ends of sequences are forgotten before their beginnings."""
        for block in reversed(blocks):
            if block == HOLE:
                continue
            assert self._users[block], f"block {block} was freed twice"
            self._users[block] -= 1
            if not self._users[block]:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._blank.append(block)
        while len(self._kept) > self._most_kept:
            self._evict()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning of a chain of keys."""
        return list(takewhile(HOLE.__ne__, self.find_each(keys)))

    def find_each(self, keys: Sequence[bytes]) -> Iterator[int]:
        """The block of each key, HOLE where it is not known."""
        return (self._by_key.get(key, HOLE) for key in keys)

    def share(self, blocks: Sequence[int]) -> None:
        """One user more for each block of `find`."""
        for block in blocks:
            if block != HOLE:
                self._users[block] += 1
                self._kept.pop(block, None)

    def name(self, block: int, key: bytes) -> None:
        """The block is full and holds what `key` says; of two alike the first is the one to be found."""
        assert self._users[block], f"block {block} is nobody's"
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key], self._key_of[block] = block, key

    def is_shared(self, block: int) -> bool:
        return self._users[block] > 1

    def forget(self, block: int) -> None:
        """Its content is about to change."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._by_key[key]

    def forget_kept(self) -> None:
        """Every kept block becomes blank, and none of them counts as taken for another."""
        while self._kept:
            self._evict()
            self.evictions -= 1

    def _evict(self) -> None:
        block, _ = self._kept.popitem(last=False)
        self.forget(block)
        self._blank.append(block)
        self.evictions += 1


@dataclass(frozen=True)
class PoolSpec:
    """Blocks of one group, and what they hold: `kind` and `window` as in CacheSpec."""

    num_blocks: int
    kind: str = "full"
    window: int | None = None


class KVBlocks:
    """One pool per group; `lengths` are given per group."""

    def __init__(self, specs: Sequence[PoolSpec], block_size: int, most_kept: int | None = None) -> None:
        """`most_kept`: blocks kept for nobody in particular; None: any number."""
        self.specs, self.block_size = tuple(specs), block_size
        unbounded = [spec.num_blocks for spec in specs if spec.window is None]
        self.capacity = min(unbounded, default=1 << 40) * block_size  # tokens one sequence could hold
        self.pools = tuple(
            BlockPool(spec.num_blocks, spec.num_blocks if most_kept is None else most_kept) for spec in self.specs
        )
        self.empty: Blocks = ((),) * len(self.specs)

    @property
    def num_free(self) -> int:
        return min(pool.num_free for pool in self.pools)

    def grow(self, blocks: Blocks, lengths: Sequence[int]) -> Blocks | None:
        """Blocks for so many tokens in each group, the old ones first, or None when a pool has too few."""
        need = [-(-length // self.block_size) - len(held) for held, length in zip(blocks, lengths, strict=True)]
        if all(count <= 0 for count in need):
            return blocks
        if any(count > pool.num_free for count, pool in zip(need, self.pools, strict=True)):
            return None
        return tuple(held + pool.allocate(max(0, count)) for held, count, pool in zip(blocks, need, self.pools, strict=True))

    def shrink(self, blocks: Blocks, lengths: Sequence[int]) -> Blocks:
        """The blocks that so many tokens still need; the rest lose this user."""
        kept = []
        for held, length, pool in zip(blocks, lengths, self.pools, strict=True):
            keep = -(-length // self.block_size)
            pool.free(held[keep:])
            kept.append(held[:keep])
        return tuple(kept)
