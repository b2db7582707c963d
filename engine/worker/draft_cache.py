"""The paged KV cache of what drafts tokens in the worker, beside the cache of the model itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models.interface import CacheSpec
from ..kv_cache.groups import group_layers
from .cache_tensors import allocate_caches


@dataclass(eq=False)
class DraftRows:
    """The blocks of one sequence in a DraftCache.

    Args:
        blocks: in order. start, stop: the positions whose keys they hold.
        token_ids: the tokens of these positions, if the drafter compares them.
    """

    blocks: list[int] = field(default_factory=list)
    start: int = 0
    stop: int = 0
    token_ids: list[int] = field(default_factory=list)


class DraftCache:
    """Blocks for the sequences of a worker. All layers share one block table per sequence.

    A sequence keeps its blocks until it ends, or until another one needs them and it was not drafted for the longest time. It
    loses guesses then, never a token of its answer.
    """

    def __init__(self, specs: Sequence[CacheSpec], num_blocks: int, block_size: int, device: torch.device) -> None:
        self._specs, self._num_blocks, self.block_size, self._device = specs, num_blocks, block_size, device
        self.tensors: Sequence[Tensor] = ()
        self.clear()
        self.allocate()

    def allocate(self) -> None:
        """Allocate the tensors, which `clear` may have freed."""
        counts = (self._num_blocks,) * len(group_layers(self._specs))
        self.tensors = allocate_caches(self._specs, counts, self.block_size, self._device)

    def clear(self) -> None:
        """Free the tensors and the blocks of all sequences."""
        self.tensors = ()
        self._free = list(range(self._num_blocks))[::-1]
        self._rows = dict[str, DraftRows]()  # the one that was used last comes last

    def get(self, key: str) -> DraftRows | None:
        """Return what a sequence has, or None. It counts as used."""
        rows = self._rows.pop(key, None)
        if rows is not None:
            self._rows[key] = rows
        return rows

    def grow(self, key: str, num_tokens: int, keep: Collection[str] = ()) -> DraftRows | None:
        """Return what a sequence has, with room for `num_tokens` tokens, or None if there is no room.

        Args:
            keep: sequences whose blocks are not taken.
        """
        rows = self.get(key) or DraftRows()
        missing = -(-num_tokens // self.block_size) - len(rows.blocks)
        while missing > len(self._free):
            victim = next((other for other in self._rows if other != key and other not in keep), None)
            if victim is None:
                return None
            self.free(victim)
        if missing > 0:
            taken = [self._free.pop() for _ in range(missing)]
            for tensor in self.tensors:
                tensor[:, taken] = 0  # masked keys must be finite
            rows.blocks += taken
        self._rows[key] = rows
        return rows

    def free(self, key: str) -> None:
        rows = self._rows.pop(key, None)
        if rows is not None:
            self._free += rows.blocks
