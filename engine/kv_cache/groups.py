"""Groups of layers that share one block table, and how many blocks their sequences need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...models.interface import CacheSpec

MAX_STATES = 3
"""Most states that a sequence holds: after the tokens computed, and after each of two steps in flight."""
CACHED_STATES = 2
"""States of the prefix cache per sequence: the newest ones. Earlier ones are evicted before the states of other sequences."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers with equal CacheSpec. They share one block table per sequence."""

    spec: CacheSpec
    layers: tuple[int, ...]

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block over all layers of the group."""
        return len(self.layers) * self.spec.block_bytes(block_size)

    def max_blocks(self, length: int, rows: int, block_size: int) -> int:
        """Return the maximum number of blocks of a sequence of `length` tokens if a step computes at most `rows` of them."""
        if self.spec.kind == "state":
            return MAX_STATES
        num_blocks = -(-length // block_size)
        if self.spec.window is None:
            return num_blocks
        blocks_in_window = (self.spec.window + rows + block_size - 3) // block_size + 1  # at the worst alignment of the window
        return min(num_blocks, blocks_in_window)

    def max_blocks_of_batch(self, num_seqs: int, length: int, rows: int, block_size: int) -> int:
        """Return the maximum number of blocks of `num_seqs` such sequences if a step computes at most `rows` rows in all."""
        longest = self.max_blocks(length, rows, block_size)
        if self.spec.kind == "state":
            return num_seqs * (longest + CACHED_STATES)
        if self.spec.window is None:
            return num_seqs * longest
        return min(num_seqs * longest, num_seqs * self.max_blocks(length, 1, block_size) + 2 * -(-rows // block_size))


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Group layers of equal spec, in order of first appearance."""
    layers: dict[CacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    return tuple(CacheGroup(spec, tuple(ids)) for spec, ids in layers.items())


def group_of_layer(groups: Sequence[CacheGroup]) -> list[int]:
    """Return the index of each layer's group, in order of layers."""
    return [index for _, index in sorted((layer, index) for index, group in enumerate(groups) for layer in group.layers)]
