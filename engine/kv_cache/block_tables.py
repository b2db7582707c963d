"""Block tables of sequences: allocation, sharing through the prefix cache, rollback and windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Protocol

from ...models.interface import CacheSpec
from ..bidirectional_spans import BidirectionalSpan, round_down
from .block_hash import hash_cross_blocks
from .block_pool import NULL_BLOCK, BlockIds, BlockPool, BlockPools
from .groups import CACHED_STATES
from .prefix import first_visible, needed_blocks, usable_prefix

CachedBlock = tuple[int, int, bytes]
"""A block that the prefix cache finds: its cache group, its number, and its hash."""
_SAVED_STATES = 4  # states of one sequence in the prefix cache, besides the newest
MIN_BLOCKS = 4
"""Models with states compute prompts of fewer blocks in one step, without a state for the prefix cache."""


@dataclass(frozen=True)
class PrefixResidency:
    """Which blocks of a prompt the prefix cache has.

    Args:
        hashes: of all full blocks before the last token.
        resident: for each cache group, whether it has each of them; () for groups that are not looked up.
    """

    hashes: tuple[bytes, ...]
    resident: tuple[tuple[bool, ...], ...]

    @property
    def num_missing(self) -> int:
        return sum(group.count(False) for group in self.resident)


class CachedSequence(Protocol):
    """The part of a sequence that BlockTables reads and writes. `engine.scheduler.request.Request` implements it."""

    token_ids: list[int]
    num_computed: int  # tokens whose keys and values are in the cache
    block_ids: BlockIds
    num_hashed_blocks: int  # blocks whose hash the prefix cache has
    cross_written: bool  # the keys and values of the encoder input are in the cache
    root_hash: bytes  # start of its chain of block hashes
    state_tokens: int  # number of tokens that its states cover
    saved_states: list[tuple[int, bytes]]  # (blocks before it, hash) of the states that it cached, ascending

    @property
    def cross_rows(self) -> int:
        """Encoder rows that it reads through cross-attention."""

    @property
    def turn_start(self) -> int:
        """Tokens before its answer."""

    @property
    def num_generated(self) -> int:
        """Tokens of its answer, as far as they are known."""

    @property
    def needs_all_rows(self) -> bool:
        """True if every prompt token has to be computed, cached or not."""

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of all full blocks of its tokens."""

    def rewind(self, num_computed: int) -> None:
        """Mark the tokens from `num_computed` on as not computed."""


class BlockTables:
    """Allocates the blocks of sequences over all cache groups.

    A group has one slot per token or, if it is of kind "cross", one per row of the encoder input. A new sequence reuses the
    blocks of its longest cached prefix; its own full blocks are hashed once all their tokens are computed. A group with a
    window holds blocks for the tokens of the next step and for the earlier tokens that they see. In such a group, a cached
    prefix needs only the blocks of its last window, and a rollback beyond the blocks held recomputes the sequence.

    A group of kind "state" has a block per state: first that of the tokens computed, then those that the steps in flight write.
    A step never overwrites the state that it reads, so a failed step can run again, and so do the accepted tokens of a step
    with wrong guesses: their rows are computed again from that state. The prefix cache keeps states at block
    boundaries: of each sequence the newest, and a few that are far from each other, where chunks of prompts and answers ended.
    A cached prefix ends at a cached state.

    Args:
        prefix_caching: sequences with equal prefixes share blocks.
        max_rows: maximum number of tokens of one sequence in a step.
    """

    def __init__(self, block_pools: BlockPools, prefix_caching: bool, max_rows: int) -> None:
        self.block_pools, self.prefix_caching, self._max_rows = block_pools, prefix_caching, max_rows
        windows = [spec.answer_window for spec in block_pools.specs if spec.answer_window is not None]
        self.answer_window = min(windows, default=None)
        self.has_states = any(spec.kind == "state" for spec in block_pools.specs)
        self.queries = self.hits = 0  # tokens of sequences given to `allocate`, and those found cached

    def allocate(self, seq: CachedSequence, spans: Sequence[BidirectionalSpan]) -> bool:
        """Allocate blocks for all tokens of a sequence without any, reusing cached ones. Return False if there are too few."""
        cached, full = self._find_cached(seq, spans)
        specs = self.block_pools.specs
        for group, pool in zip(cached, self.block_pools.pools, strict=True):
            pool.touch(group)
        blocks = self.block_pools.grow(cached, self._slots(seq, full * self.block_pools.block_size))
        if blocks is None:
            self.block_pools.shrink(cached, [0] * len(cached))
            return False
        seq.block_ids = blocks
        seq.rewind(full * self.block_pools.block_size)
        seq.num_hashed_blocks, seq.state_tokens = full, seq.num_computed
        cross = [group for group, spec in zip(cached, specs, strict=True) if spec.kind == "cross"]
        seq.cross_written = not seq.cross_rows or all(cross)
        self.queries += len(seq.token_ids)
        self.hits += seq.num_computed
        return True

    def grow(self, seq: CachedSequence, more: int = 0, ahead: bool = False) -> bool:
        """Extend a sequence's blocks to all its tokens and `more`. Return False if there are too few blocks.

        `ahead`: for the step after the one in flight, which begins at the last of these tokens.
        """
        tokens = len(seq.token_ids) + more
        start = tokens - 1 if ahead else seq.num_computed
        blocks = self.block_pools.grow(seq.block_ids, self._slots(seq, start, tokens, states=2 + ahead))
        seq.block_ids = blocks or seq.block_ids
        return blocks is not None

    def free(self, seq: CachedSequence) -> None:
        """Free all blocks of a sequence, and mark all its tokens as not computed."""
        seq.block_ids = self.block_pools.shrink(seq.block_ids, [0] * len(seq.block_ids))
        seq.rewind(0)
        seq.num_hashed_blocks, seq.cross_written, seq.state_tokens = 0, not seq.cross_rows, 0

    def roll_back(self, seq: CachedSequence, spans: Sequence[BidirectionalSpan]) -> None:
        """Free the blocks of tokens that a rollback removed.

        The block that the sequence now ends in will be written again. It loses its hash or, if other sequences share it, is
        replaced by a new block and computed again.
        """
        size, first = self.block_pools.block_size, seq.num_computed // self.block_pools.block_size
        seq.block_ids = self.block_pools.shrink(seq.block_ids, self._slots(seq, seq.num_computed))
        rewritten = [
            (pool, block) for blocks, pool, _ in self._token_groups(seq) for block in blocks[first:] if block != NULL_BLOCK
        ]
        if any(pool.is_shared(block) for pool, block in rewritten):
            start = round_down(first * size, size, spans)
            first = start // size
            seq.rewind(start)
            seq.block_ids = self.block_pools.shrink(seq.block_ids, self._slots(seq, start, start))
        else:
            for pool, block in rewritten:
                pool.remove_hash(block)
        seq.num_hashed_blocks = min(seq.num_hashed_blocks, first)
        visible = [blocks[first_visible(spec, seq.num_computed, size) :] for blocks, _, spec in self._token_groups(seq)]
        if any(NULL_BLOCK in blocks for blocks in visible) or (self.has_states and seq.state_tokens != seq.num_computed):
            self.free(seq)
            self.allocate(seq, spans)  # on failure, it gets blocks when it is scheduled

    def free_rejected(self, seq: CachedSequence) -> None:
        """Free blocks that only hold tokens after those computed, which were guessed wrongly."""
        seq.block_ids = self.block_pools.shrink(seq.block_ids, self._slots(seq, seq.num_computed))

    def keep_states(self, seq: CachedSequence) -> None:
        """Go on from the states that the last step has read: those it wrote include tokens that were guessed wrongly."""
        if self.has_states:
            seq.rewind(seq.state_tokens)

    def room_to_state(self, seq: CachedSequence) -> int:
        """Return how many guesses a step may verify: with states, as many as end where the next one is cached."""
        size = self.block_pools.block_size
        if not (self.has_states and self.prefix_caching):
            return maxsize
        return (seq.num_computed // size + 1) * size - len(seq.token_ids)

    def end_at_window(self, seq: CachedSequence, count: int) -> int:
        """Return how many of the next `count` tokens to compute: one at a time once an answer fills its window.

        The key of a token then overwrites one that the tokens before it in the step would still read.
        """
        if self.answer_window is None:
            return count
        return min(count, max(1, seq.turn_start + self.answer_window - seq.num_computed))

    def advance_states(self, seq: CachedSequence) -> list[CachedBlock]:
        """Replace the states of a sequence by those that its last step wrote; cache them if its tokens end a block.

        Return the states that are cached now and were not before.
        """
        if not self.has_states or seq.state_tokens == seq.num_computed:
            return []
        for group, pool in self._states(seq.block_ids):
            pool.free(group[:1])
        seq.block_ids = self.skip_state(seq.block_ids)
        seq.state_tokens = seq.num_computed
        blocks, rest = divmod(seq.num_computed, self.block_pools.block_size)
        if rest or not self.prefix_caching:
            return []
        state_hash = seq.block_hashes(self.block_pools.block_size)[blocks - 1]
        groups = enumerate(zip(seq.block_ids, self.block_pools.pools, self.block_pools.specs, strict=True))
        states = [(number, ids[0], pool) for number, (ids, pool, spec) in groups if spec.kind == "state"]
        new = [(number, block, state_hash) for number, block, pool in states if pool.cache_block(block, state_hash)]
        if len(new) == len(states):
            self._drop_states(seq, blocks)
            seq.saved_states.append((blocks, state_hash))
        return new

    def _drop_states(self, seq: CachedSequence, blocks: int) -> None:
        """Remove states of a sequence from the prefix cache before one after `blocks` blocks is added.

        Of the answer, earlier states are removed. Of the prompt, the state nearest to its neighbours is removed if there are
        too many; the newest one stays.
        """
        prompt, saved = len(seq.token_ids) - seq.num_generated, seq.saved_states
        kept = [state for state in saved if state[0] * self.block_pools.block_size <= prompt and state[0] < blocks]
        if len(kept) > _SAVED_STATES:
            lengths = [0, *(num_blocks for num_blocks, _ in kept)]
            kept.pop(min(range(_SAVED_STATES), key=lambda index: lengths[index + 2] - lengths[index]))
        for _, pool in self._states(seq.block_ids):
            for state in saved:
                if state not in kept:
                    pool.drop(state[1])
            for _, state_hash in kept[-CACHED_STATES : 1 - CACHED_STATES]:
                pool.evict_next(state_hash)
        seq.saved_states = kept

    def skip_state(self, block_ids: BlockIds) -> BlockIds:
        """Return the blocks without the first state of each group, for the step that follows the one in flight."""
        specs = self.block_pools.specs
        return tuple(group[1:] if spec.kind == "state" else group for group, spec in zip(block_ids, specs, strict=True))

    def end_at_state(self, seq: CachedSequence, count: int) -> int:
        """Return how many of the next `count` tokens to compute: fewer if a chunk can then end where its state is cached."""
        size, start = self.block_pools.block_size, seq.num_computed
        last = (len(seq.token_ids) - 1) // size * size  # where a cached prefix of this prompt can end
        stop = min(start + count, last) // size * size
        is_cached = self.has_states and self.prefix_caching and not seq.needs_all_rows and last >= MIN_BLOCKS * size
        return stop - start if is_cached and start < stop else count

    def free_behind_windows(self, seq: CachedSequence) -> None:
        """Free blocks that no later token sees, in groups with a window."""
        groups = list(seq.block_ids)
        for number, (pool, spec) in enumerate(zip(self.block_pools.pools, self.block_pools.specs, strict=True)):
            if spec.window is None:
                continue
            group, stop = groups[number], first_visible(spec, seq.num_computed, self.block_pools.block_size)
            first = stop
            while first and group[first - 1] != NULL_BLOCK:
                first -= 1
            if first < stop:
                pool.free(group[first:stop])
                groups[number] = (NULL_BLOCK,) * stop + group[stop:]
        seq.block_ids = tuple(groups)

    def cache_full_blocks(self, seq: CachedSequence) -> list[CachedBlock]:
        """Make full blocks whose tokens are computed findable in the prefix cache. Return those that are new there."""
        done = self._shareable(seq, seq.num_computed) // self.block_pools.block_size
        if not self.prefix_caching or done <= seq.num_hashed_blocks:
            return []
        hashes, new = seq.block_hashes(self.block_pools.block_size), list[CachedBlock]()
        groups = zip(seq.block_ids, self.block_pools.pools, self.block_pools.specs, strict=True)
        for number, (group, pool, spec) in enumerate(groups):
            if spec.kind in ("cross", "state"):
                continue
            indices = range(seq.num_hashed_blocks, done)
            new += [(number, group[i], hashes[i]) for i in indices if pool.cache_block(group[i], hashes[i])]
        seq.num_hashed_blocks = done
        return new

    def prefix_residency(self, seq: CachedSequence) -> PrefixResidency | None:
        """Return which blocks of a sequence, which holds none, are in the prefix cache; None if it cannot be admitted now."""
        size = self.block_pools.block_size
        hashes, resident = seq.block_hashes(size)[: self._shareable(seq, len(seq.token_ids) - 1) // size], []
        pools = zip(self.block_pools.pools, self.block_pools.specs, self._slots(seq, 0), strict=True)
        for pool, spec, slots in pools:
            blocks = [] if spec.kind == "cross" else list(pool.find_cached(hashes))
            if -(-slots // size) - pool.num_in_use(blocks) > pool.num_free:
                return None
            resident.append(tuple(block != NULL_BLOCK for block in blocks))
        return PrefixResidency(tuple(hashes), tuple(resident))

    def insert_cached(self, seq: CachedSequence, found: Sequence[tuple[int, int]]) -> list[CachedBlock]:
        """Put blocks of a prompt into the prefix cache; the caller fills them before the next step.

        Args:
            found: (cache group, index of the block in the prompt), first blocks first.

        Returns:
            Those that got a block; there may be too few.
        """
        hashes, inserted = seq.block_hashes(self.block_pools.block_size), list[CachedBlock]()
        for number, pool in enumerate(self.block_pools.pools):
            indices = [index for group, index in found if group == number]
            if not indices:
                continue
            in_use = list(pool.find_cached_prefix(hashes[: indices[0]]))
            pool.touch(in_use)  # what the prompt starts with is not evicted for what follows
            for index in indices:
                if pool.num_free and next(pool.find_cached(hashes[index : index + 1])) == NULL_BLOCK:
                    (block,) = pool.allocate(1)
                    pool.cache_block(block, hashes[index])
                    inserted.append((number, block, hashes[index]))
                    in_use.append(block)
            pool.free(in_use, trim=False)  # they stay until the sequence is admitted
        return inserted

    def cache_cross_blocks(self, seq: CachedSequence) -> None:
        """Make the blocks of the encoder input findable in the prefix cache. One step writes all of them."""
        seq.cross_written = True
        for group, pool, spec in zip(seq.block_ids, self.block_pools.pools, self.block_pools.specs, strict=True):
            if spec.kind == "cross" and self.prefix_caching:
                for block, block_hash in zip(group, self._cross_hashes(seq), strict=True):
                    pool.cache_block(block, block_hash)

    def unhashed_blocks(self, seq: CachedSequence) -> tuple[tuple[int, int], ...]:
        """Return (cache group, block) of all blocks of a sequence that earlier steps have not completed and hashed."""
        cross = len(self._cross_hashes(seq)) if seq.cross_written else 0
        groups = enumerate(zip(seq.block_ids, self.block_pools.specs, strict=True))
        unhashed = [
            (group, ids[cross if spec.kind == "cross" else seq.num_hashed_blocks :])
            for group, (ids, spec) in groups
            if spec.kind != "state"  # a state is written whole before it is read
        ]
        return tuple((group, block) for group, blocks in unhashed for block in blocks if block != NULL_BLOCK)

    def _find_cached(self, seq: CachedSequence, spans: Sequence[BidirectionalSpan]) -> tuple[BlockIds, int]:
        """Return the cached blocks that a sequence starts with, and how many blocks of tokens they are.

        They include those of its encoder input if all of them are cached. The last token is never taken from the cache, because
        its logits are needed.
        """
        if not self.prefix_caching:
            return self.block_pools.empty, 0
        size, cross = self.block_pools.block_size, self._cross_hashes(seq)
        hashes = [] if seq.needs_all_rows else seq.block_hashes(size)[: self._shareable(seq, len(seq.token_ids) - 1) // size]
        cached = []
        for pool, spec in zip(self.block_pools.pools, self.block_pools.specs, strict=True):
            if spec.window is not None or spec.kind == "state":
                cached.append(tuple(pool.find_cached(hashes)))
            else:
                cached.append(tuple(pool.find_cached_prefix(cross if spec.kind == "cross" else hashes)))
        keep = usable_prefix(cached, self.block_pools.specs, size, spans)
        blocks = []
        for group, spec in zip(cached, self.block_pools.specs, strict=True):
            needed = needed_blocks(spec, keep, size)
            if spec.kind == "cross":
                blocks.append(group if len(group) == len(cross) else ())
            elif spec.kind == "state":
                blocks.append(group[needed.start : keep])
            else:
                blocks.append((NULL_BLOCK,) * needed.start + group[needed.start : keep])
        return tuple(blocks), keep

    def _shareable(self, seq: CachedSequence, tokens: int) -> int:
        """Return how many of the first `tokens` tokens other sequences may share: not those of an answer with a window."""
        return tokens if self.answer_window is None else min(tokens, seq.turn_start)

    def _slots(self, seq: CachedSequence, start: int, tokens: int | None = None, states: int = 2) -> list[int]:
        """Return the slots per group for `tokens` tokens (None: all) if the next step begins at token `start`."""
        tokens = len(seq.token_ids) if tokens is None else tokens
        near = min(tokens, start + self._max_rows)
        slots = {"cross": seq.cross_rows, "window": near, "chunk": near, "state": states * self.block_pools.block_size}
        return [slots.get(spec.kind, spec.num_slots(tokens, seq.turn_start)) for spec in self.block_pools.specs]

    def _cross_hashes(self, seq: CachedSequence) -> list[bytes]:
        return hash_cross_blocks(seq.root_hash, -(-seq.cross_rows // self.block_pools.block_size))

    def _token_groups(self, seq: CachedSequence) -> list[tuple[tuple[int, ...], BlockPool, CacheSpec]]:
        """Return (blocks, pool, spec) of every group with a slot per token."""
        groups = zip(seq.block_ids, self.block_pools.pools, self.block_pools.specs, strict=True)
        return [(blocks, pool, spec) for blocks, pool, spec in groups if spec.kind not in ("cross", "state")]

    def _states(self, block_ids: BlockIds) -> list[tuple[tuple[int, ...], BlockPool]]:
        """Return (blocks, pool) of every group of states."""
        groups = zip(block_ids, self.block_pools.pools, self.block_pools.specs, strict=True)
        return [(blocks, pool) for blocks, pool, spec in groups if spec.kind == "state"]
