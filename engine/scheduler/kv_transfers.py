"""Decides which KV blocks go to the connectors, and which sequences wait for blocks from there."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv_cache.block_tables import BlockTables, CachedBlock
from ..types import KVBlock, KVLookup, KVLookupResult, KVTransfer
from .limits import SchedulerLimits
from .request import Request, State
from .request_queues import RequestQueues

_POLL_SECONDS = 0.005  # how long a step with nothing to compute waits for the connectors


class KVTransfers:
    """The traffic between the prefix cache and the connectors.

    Each full block is saved once it is computed. A sequence that waits and has no blocks, because it is new or has lost them to
    another one, waits for the connectors first (`State.LOADING`). What they have is put into the prefix cache, where its
    admission finds it. What is missing, damaged or late is computed.

    Args:
        saves: blocks are saved. loads: blocks are looked up.
    """

    def __init__(
        self, queues: RequestQueues, block_tables: BlockTables, limits: SchedulerLimits, saves: bool = True, loads: bool = True
    ) -> None:
        self._queues, self._tables, self._limits = queues, block_tables, limits
        self._saves, self._loads = saves, loads
        self._computed: list[KVBlock] = []
        self._loading: dict[int, tuple[Request, int]] = {}  # lookups in flight by epoch, with how many blocks they may read

    @property
    def num_loading(self) -> int:
        """Number of sequences that wait for the connectors. Those that have ended meanwhile do not count."""
        return sum(request.state is State.LOADING for request, _ in self._loading.values())

    def add_computed(self, request: Request, blocks: Sequence[CachedBlock]) -> None:
        """Save blocks that a sequence has computed, unless it is a live stream, whose content is kept nowhere."""
        is_live = bool(request.features) and request.features[0].stream is not None
        if self._saves and not is_live:
            self._computed += [KVBlock(*block) for block in blocks]

    def take_computed(self) -> KVTransfer | None:
        """Return the message that saves the blocks computed since the last call, None if there are none."""
        blocks, self._computed = tuple(self._computed), []
        return KVTransfer(save=blocks) if blocks else None

    def begin(self) -> KVTransfer | None:
        """Begin lookups for waiting sequences, and cancel those that nobody needs. Return the message, None without lookups."""
        cancelled = tuple(number for number, (request, _) in self._loading.items() if not _waits_for(request, number))
        for number in cancelled:
            request, _ = self._loading.pop(number)
            if self._queues.requests.get(request.request_id) is request and request.state is State.LOADING:
                self._queues.enqueue(request)  # its tokens have changed
        lookups = self._look_up() if self._loads else []
        if not self._loading and not cancelled:
            return None
        is_idle = not self._queues.running and not self._queues.waiting
        return KVTransfer(look_up=tuple(lookups), cancel=cancelled, poll_seconds=_POLL_SECONDS if is_idle else 0.0)

    def place(self, found: Sequence[KVLookupResult]) -> KVTransfer | None:
        """Put what lookups have read into the prefix cache, and let their sequences wait for admission."""
        placed = []
        for result in found:
            request, _ = self._loading.pop(result.number)
            blocks = tuple(KVBlock(*block) for block in self._tables.insert_cached(request, result.blocks))
            placed.append((result.number, blocks))
            self._queues.enqueue(request)
        return KVTransfer(place=tuple(placed)) if placed else None

    def give_up(self) -> None:
        """Let the sequences that wait for lookups be computed. The next message cancels these lookups."""
        for request, _ in self._loading.values():
            if request.state is State.LOADING:
                self._queues.enqueue(request)

    def forget(self, placed: KVTransfer) -> None:
        """Remove blocks from the prefix cache that could not be filled."""
        for _, blocks in placed.place:
            for block in blocks:
                self._tables.block_pools.pools[block.group].drop(block.hash)

    def _look_up(self) -> list[KVLookup]:
        """Begin lookups for the waiting sequences that are admitted next, for no more blocks in all than are free."""
        lookups, pools = list[KVLookup](), self._tables.block_pools
        room = max(1, self._limits.max_num_seqs - len(self._queues.running)) - len(self._loading)
        free = sum(pool.num_free for pool in pools.pools) - sum(count for _, count in self._loading.values())
        for request in self._queues.waiting[: max(0, room)]:
            if any(request.block_ids) or request.needs_all_rows:
                continue
            prefix = self._tables.prefix_residency(request)
            if prefix is None or (prefix.num_missing > free and self._loading):
                break
            if prefix.num_missing <= self._missing_of(request):  # else the blocks that it had or got were taken
                continue
            request.looked_up = request.epoch, prefix.num_missing
            free -= prefix.num_missing
            self._queues.waiting.remove(request)
            request.state = State.LOADING
            self._loading[request.epoch] = request, prefix.num_missing
            spans = tuple(request.spans(self._limits.prompt_attention))
            lookups.append(KVLookup(request.epoch, prefix.hashes, prefix.resident, spans))
        return lookups

    def _missing_of(self, request: Request) -> int:
        """Return how many blocks of a sequence were missing when they were last looked up."""
        epoch, missing = request.looked_up
        return missing if epoch == request.epoch else 0


def _waits_for(request: Request, number: int) -> bool:
    return request.state is State.LOADING and request.epoch == number
