"""Copies KV blocks between the caches of a model runner and the connectors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from ...mm.hashing import digest
from ...models.interface import CacheSpec
from ..connectors.packing import PackedSpec
from ..connectors.tensor_store import TensorStore
from ..kv_cache.block_pool import NULL_BLOCK
from ..kv_cache.groups import CacheGroup
from ..kv_cache.prefix import needed_blocks, usable_prefix
from ..types import KVBlock, KVLookup, KVLookupResult, KVTransfer

LOAD_SECONDS = 10.0  # how long a prompt waits for its blocks
_THREADS = 4  # prompts whose blocks are read at a time
_BLOCK = "block"  # the name of a block's tensor
_NO_LAYERS = torch.empty(0)  # the content of a block of whose layers this rank holds none
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _BlockLoad:
    """A lookup in flight. `blocks`: what was read so far, by (cache group, index in the prompt)."""

    lookup: KVLookup
    deadline: float
    future: Future[None] | None = None
    blocks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    cancelled: bool = False


class KVBlockStore:
    """Saves blocks by their hash, and reads those of a prompt in threads. A block is one tensor over the layers of its group.

    If a group has no layers here, because other ranks hold them, its blocks are not saved, and lookups report all of them.

    Args:
        groups: those of all ranks, each with the layers that this one holds.

    Attributes:
        load_seconds: how long a prompt waits for its blocks; it then goes on with those that were read.
        save_seconds: how long a step waits until the blocks that it has computed are written. A producer waits, so that other
            engines find the blocks of a prompt once it has been answered.
    """

    load_seconds, save_seconds = LOAD_SECONDS, 0.0

    def __init__(self, store: TensorStore, groups: Sequence[CacheGroup], block_size: int) -> None:
        self.store, self._groups, self._block_size = store, groups, block_size
        self._specs = [{_BLOCK: _block_spec(group, block_size)} for group in groups]
        self._cache_specs: list[CacheSpec] = [group.spec for group in groups]
        self._loads: dict[int, _BlockLoad] = {}  # by the number of the lookup
        self._arrived: dict[int, _BlockLoad] = {}  # those that were reported, and neither placed nor cancelled
        self._readers = ThreadPoolExecutor(_THREADS, "sensorium-kv-blocks")

    def transfer(self, caches: Sequence[Tensor], transfer: KVTransfer) -> tuple[KVLookupResult, ...]:
        """Copy blocks as the message says. `caches`: the tensors by layer.

        Return the lookups that have ended, each once. What one has read is kept until it is placed or cancelled.
        """
        self._save(caches, transfer.save)
        placed = [(self._arrived.pop(number), blocks) for number, blocks in transfer.place]
        for load, blocks in placed:
            self._place(caches, load, blocks)
        for number in transfer.cancel:
            self._arrived.pop(number, None)
            if number in self._loads:
                self._loads.pop(number).cancelled = True
        for lookup in transfer.look_up:
            load = _BlockLoad(lookup, time.monotonic() + self.load_seconds)
            load.blocks.update((place, _NO_LAYERS) for place in _missing(lookup) if not self._groups[place[0]].layers)
            load.future = self._readers.submit(self._load, load)
            self._loads[lookup.number] = load
        if transfer.poll_seconds is None:
            return ()
        if transfer.poll_seconds:
            wait([load.future for load in self._loads.values() if load.future], transfer.poll_seconds, FIRST_COMPLETED)
        return tuple(self._take_arrived())

    def forget_saved(self) -> None:
        """Make all saved blocks unfindable, because the weights change. The new namespace is random: no other engine has it."""
        self.store.namespace = digest("sensorium.updated", os.urandom(32))

    def close(self) -> None:
        """Write what waits, and end the threads."""
        for load in self._loads.values():
            load.cancelled = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def _save(self, caches: Sequence[Tensor], blocks: Sequence[KVBlock]) -> None:
        for number, group in enumerate(self._groups):
            own = [block for block in blocks if block.group == number]
            if not own or not group.layers:
                continue
            ids = torch.tensor([block.block for block in own], device=caches[group.layers[0]].device)
            dim = 0 if group.spec.kind == "state" else 1  # of blocks, see `allocate_caches`
            layers = torch.stack([caches[layer].index_select(dim, ids) for layer in group.layers]).cpu()
            for block, content in zip(own, layers.unbind(dim + 1), strict=True):
                self.store.put(_name(block.hash, number), {_BLOCK: content})
        if blocks and self.save_seconds:
            self.store.flush(self.save_seconds)

    def _place(self, caches: Sequence[Tensor], load: _BlockLoad, blocks: Sequence[KVBlock]) -> None:
        """Fill blocks with what a lookup has read."""
        indices = {block_hash: index for index, block_hash in enumerate(load.lookup.hashes)}
        for block in blocks:
            content, group = load.blocks[block.group, indices[block.hash]], self._groups[block.group]
            for layer, part in zip(group.layers, content, strict=True):
                cache = caches[layer]
                (cache[block.block] if group.spec.kind == "state" else cache[:, block.block]).copy_(part)

    def _load(self, load: _BlockLoad) -> None:
        """Read the blocks of the longest prefix that the cache and the connectors have together. Runs in a thread."""
        for group, index in self._find(load.lookup):
            if load.cancelled:
                return
            found = self.store.get(_name(load.lookup.hashes[index], group), self._specs[group])
            if found is None:
                return  # what comes after it is of no use without it
            load.blocks[group, index] = found.tensors[_BLOCK]

    def _find(self, lookup: KVLookup) -> list[tuple[int, int]]:
        """Return (group, index) of the blocks to read, first blocks first."""
        groups, missing = range(len(self._groups)), _missing(lookup)
        places = {_name(lookup.hashes[index], group): (group, index) for group, index in missing if self._groups[group].layers}
        kept = {places[name] for name in self.store.contains(list(places))}
        stored = kept | {place for place in missing if not self._groups[place[0]].layers}
        cached = []
        for group, spec in enumerate(self._cache_specs):
            resident = lookup.resident[group]
            blocks = [0 if here or (group, index) in stored else NULL_BLOCK for index, here in enumerate(resident)]
            has_gaps = spec.window is not None or spec.kind == "state"
            cached.append(blocks if has_gaps else list(takewhile(NULL_BLOCK.__ne__, blocks)))
        keep = usable_prefix(cached, self._cache_specs, self._block_size, lookup.spans)
        needed = {
            (group, index) for group in groups for index in needed_blocks(self._cache_specs[group], keep, self._block_size)
        }
        return sorted(needed & kept, key=lambda place: (place[1], place[0]))

    def _take_arrived(self) -> list[KVLookupResult]:
        """Return the lookups that have ended or exceeded their deadline."""
        found = []
        for number, load in list(self._loads.items()):
            assert load.future is not None
            is_done, is_late = load.future.done(), time.monotonic() >= load.deadline
            if not is_done and not is_late:
                continue
            load.cancelled = True
            del self._loads[number]
            if not is_done:
                self.store.count_late()
            elif (error := load.future.exception()) is not None:
                _log.error("KV blocks cannot be read", exc_info=error)
            self._arrived[number] = replace(load, blocks=dict(load.blocks))
            found.append(KVLookupResult(number, tuple(self._arrived[number].blocks)))
        return found


def _missing(lookup: KVLookup) -> list[tuple[int, int]]:
    """Return (group, index in the prompt) of the blocks that the cache lacks."""
    groups = enumerate(lookup.resident)
    return [(group, index) for group, resident in groups for index, is_here in enumerate(resident) if not is_here]


def _name(block_hash: bytes, group: int) -> str:
    return f"{block_hash.hex()}.{group}"


def _block_spec(group: CacheGroup, block_size: int) -> PackedSpec:
    """Return shape and dtype of a block: `[layers, planes, block_size, kv_heads, width]`, or `[layers, width]` for states."""
    spec, layers = group.spec, len(group.layers)
    shape = (layers, spec.width) if spec.kind == "state" else (layers, spec.planes, block_size, spec.kv_heads, spec.width)
    return PackedSpec(shape, spec.storage_dtype)
