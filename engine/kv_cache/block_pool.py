"""Block pools: allocation, reference counts and the prefix cache of KV-cache blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

from ...models.interface import CacheSpec

BlockIds = tuple[tuple[int, ...], ...]  # physical block of each logical block, per cache group
NULL_BLOCK = -1  # stands for a block behind the window of its group, which no later token reads


class BlockPool:
    """The blocks of one cache group.

    A block is in use by one or more sequences, or cached (in use by none, found by its hash), or free. A full block gets a
    hash with `cache_block`; from then on `find_cached` finds it, in use or not, until it is evicted.

    Args:
        num_blocks: blocks of the pool.
        max_cached: maximum number of cached blocks; above it, the least recently used is evicted.
    """

    def __init__(self, num_blocks: int, max_cached: int) -> None:
        self.num_blocks, self._max_cached = num_blocks, max_cached
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones that it may evict."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks, evicting cached ones if too few are free. The caller checks `num_free` first."""
        assert count <= self.num_free, "allocate() needs num_free to be checked first"
        while len(self._free) < count:
            self._evict()
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            assert not self._ref_counts[block], f"block {block} was allocated twice"
            self._ref_counts[block] = 1
        return taken

    def free(self, blocks: Sequence[int], trim: bool = True) -> None:
        """Drop one reference to each block. The last blocks of a sequence are evicted before its first ones.

        `trim`: evict cached blocks above the maximum now, not with the next call.
        """
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert self._ref_counts[block], f"block {block} was freed twice"
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        while trim and len(self._cached) > self._max_cached:
            self._evict()

    def find_cached_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of a chain of hashes."""
        return list(takewhile(NULL_BLOCK.__ne__, self.find_cached(hashes)))

    def find_cached(self, hashes: Sequence[bytes]) -> Iterator[int]:
        """Yield the block with each hash, NULL_BLOCK where there is none."""
        return (self._block_of.get(block_hash, NULL_BLOCK) for block_hash in hashes)

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block, so that cached ones are not evicted."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._ref_counts[block] += 1
                self._cached.pop(block, None)

    def cache_block(self, block: int, block_hash: bytes) -> bool:
        """Make a full block in use findable by its hash. Return False if it has a hash, or if another block has this one."""
        assert self._ref_counts[block], f"block {block} is not in use"
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._block_of[block_hash], self._hash_of[block] = block, block_hash
        return True

    def num_in_use(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks sequences use."""
        return sum(block != NULL_BLOCK and self._ref_counts[block] > 0 for block in blocks)

    def is_shared(self, block: int) -> bool:
        return self._ref_counts[block] > 1

    def remove_hash(self, block: int) -> None:
        """Make a block unfindable because its content is about to change."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def drop(self, block_hash: bytes) -> None:
        """Free the cached block with this hash, unless a sequence uses it."""
        block = self._block_of.get(block_hash, NULL_BLOCK)
        if block in self._cached:
            del self._cached[block]
            self.remove_hash(block)
            self._free.append(block)

    def evict_next(self, block_hash: bytes) -> None:
        """Make the cached block with this hash the next to evict, unless a sequence uses it."""
        block = self._block_of.get(block_hash, NULL_BLOCK)
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def reset_prefix_cache(self) -> None:
        """Free every cached block. This does not count as evictions."""
        while self._cached:
            self._evict()
            self.evictions -= 1

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self.remove_hash(block)
        self._free.append(block)
        self.evictions += 1


class BlockPools:
    """The block pools of all cache groups. Methods take and return blocks per group; lengths are slots per group."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: Sequence[int],
        block_size: int,
        max_cached: Sequence[int] | None = None,
        block_bytes: Sequence[int] | None = None,
    ) -> None:
        """All arguments but `block_size` are per group. `max_cached`: maximum of cached blocks, None for no limit."""
        self.specs, self.block_size = tuple(specs), block_size
        self._block_bytes = block_bytes or [1] * len(self.specs)
        sized = list(zip(specs, num_blocks, strict=True))
        unbounded = [count for spec, count in sized if spec.window is None and spec.kind not in ("cross", "state")]
        self.capacity = min(unbounded, default=1 << 40) * block_size  # tokens one sequence could hold
        cross = [count for spec, count in sized if spec.kind == "cross"]
        self.cross_capacity = min(cross, default=1 << 40) * block_size  # encoder rows one sequence could read
        self.pools = tuple(map(BlockPool, num_blocks, max_cached or num_blocks))
        self.empty: BlockIds = ((),) * len(self.specs)

    @property
    def num_free(self) -> int:
        return min(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        """Fraction of the bytes of all groups that sequences use."""
        sizes = list(zip(self.pools, self._block_bytes, strict=True))
        used = sum((pool.num_blocks - pool.num_free) * size for pool, size in sizes)
        return used / max(1, sum(pool.num_blocks * size for pool, size in sizes))

    def grow(self, blocks: BlockIds, lengths: Sequence[int]) -> BlockIds | None:
        """Append blocks until each group has `lengths` slots. Return None and change nothing if a pool has too few."""
        need = [-(-length // self.block_size) - len(group) for group, length in zip(blocks, lengths, strict=True)]
        if all(count <= 0 for count in need):
            return blocks
        if any(count > pool.num_free for count, pool in zip(need, self.pools, strict=True)):
            return None
        return tuple(group + pool.allocate(max(0, count)) for group, count, pool in zip(blocks, need, self.pools, strict=True))

    def shrink(self, blocks: BlockIds, lengths: Sequence[int]) -> BlockIds:
        """Keep the blocks of the first `lengths` slots and free the rest."""
        kept = []
        for group, length, pool in zip(blocks, lengths, self.pools, strict=True):
            keep = -(-length // self.block_size)
            pool.free(group[keep:])
            kept.append(group[:keep])
        return tuple(kept)
