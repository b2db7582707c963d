"""Which blocks a sequence lives in, and which of them it shares with others. Knows no step and no budget."""

from __future__ import annotations

from collections.abc import Sequence

from .atoms import Atom, round_down
from .kv import HOLE, BlockPool, Blocks, KVBlocks
from .prefix_cache import cross_keys
from .request import Request


class BlockTables:
    """Blocks of sequences over all cache groups: a slot per token, but in "cross" groups per row of the encoder side.

    A sequence begins in the full blocks that earlier ones left behind; a block becomes known once all its tokens are computed.
    A group with a window has blocks for the tokens of the next step, and of those before it only what they see: a beginning
    is found there if the last window of it is, and a rollback to where keys are gone starts again.

    Args:
        caching: whether blocks are shared at all.
        rows: tokens of one sequence in a step, at most.
    """

    def __init__(self, kv: KVBlocks, caching: bool, rows: int) -> None:
        self.kv, self.caching, self._rows = kv, caching, rows
        self.queries = self.hits = 0  # tokens of placed sequences, and how many of them were there

    def place(self, request: Request, parts: Sequence[Atom]) -> bool:
        """Room for all known tokens of a sequence without blocks, the first of them shared; False for too little."""
        found = self._find(request, parts)
        for held, pool in zip(found, self.kv.pools, strict=True):
            pool.share(held)
        full = max((len(held) for held, spec in zip(found, self.kv.specs, strict=True) if spec.kind != "cross"), default=0)
        blocks = self.kv.grow(found, self._lengths(request, full * self.kv.block_size))
        if blocks is None:
            self.kv.shrink(found, [0] * len(found))
            return False
        request.block_ids = blocks
        request.rewind(full * self.kv.block_size)
        request.num_named = full
        cross = [held for held, spec in zip(found, self.kv.specs, strict=True) if spec.kind == "cross"]
        request.cross_done = not request.cross_rows or all(cross)
        self.queries += len(request.token_ids)
        self.hits += request.num_computed
        return True

    def grow(self, request: Request, ahead: bool = False) -> bool:
        """Room for all known tokens of a sequence that has blocks, and one to come if `ahead`; False for too little."""
        known = len(request.token_ids)
        start, tokens = (known, known + 1) if ahead else (request.num_computed, known)
        blocks = self.kv.grow(request.block_ids, self._lengths(request, start, tokens))
        request.block_ids = blocks or request.block_ids
        return blocks is not None

    def drop(self, request: Request) -> None:
        """All blocks lose this user, and the sequence what was computed."""
        request.block_ids = self.kv.shrink(request.block_ids, [0] * len(request.block_ids))
        request.rewind(0)
        request.num_named, request.cross_done = 0, not request.cross_rows

    def roll_back(self, request: Request, parts: Sequence[Atom]) -> None:
        """After the sequence lost its end: the block it now ends in is written again, by whoever owns it alone."""
        size, first = self.kv.block_size, request.num_computed // self.kv.block_size
        request.block_ids = self.kv.shrink(request.block_ids, self._lengths(request, request.num_computed))
        again = [(pool, block) for held, pool, _ in self._of_tokens(request) for block in held[first:] if block != HOLE]
        if any(pool.is_shared(block) for pool, block in again):
            request.rewind(first * size)
            request.block_ids = self.kv.shrink(request.block_ids, self._lengths(request, first * size, first * size))
        else:
            for pool, block in again:
                pool.forget(block)
        request.num_named = min(request.num_named, first)
        if any(HOLE in held[self._first(window, request.num_computed) :] for held, _, window in self._of_tokens(request)):
            self.drop(request)
            self.place(request, parts)  # else it is without blocks, and gets them as it grows

    def trim(self, request: Request) -> None:
        """Blocks that lie behind a window are given back."""
        groups = list(request.block_ids)
        for number, (pool, spec) in enumerate(zip(self.kv.pools, self.kv.specs, strict=True)):
            held, stop = groups[number], self._first(spec.window, request.num_computed)
            first = stop
            while first and held[first - 1] != HOLE:
                first -= 1
            if first < stop:
                pool.free(held[first:stop])
                groups[number] = (HOLE,) * stop + held[stop:]
        request.block_ids = tuple(groups)

    def name(self, request: Request) -> None:
        """Full blocks that are computed can be found from now on."""
        done = request.num_computed // self.kv.block_size
        if not self.caching or done <= request.num_named:
            return
        keys = request.block_keys(self.kv.block_size)
        for held, pool, _ in self._of_tokens(request):
            for index in range(request.num_named, done):
                pool.name(held[index], keys[index])
        request.num_named = done

    def name_cross(self, request: Request) -> None:
        """The same for the encoder side, which is written at once."""
        request.cross_done = True
        for held, pool, spec in zip(request.block_ids, self.kv.pools, self.kv.specs, strict=True):
            if spec.kind == "cross" and self.caching:
                for block, key in zip(held, self._cross_keys(request), strict=True):
                    pool.name(block, key)

    def unnamed(self, request: Request) -> Blocks:
        """Blocks whose content nobody vouches for."""
        cross = len(self._cross_keys(request)) if request.cross_done else 0
        known = [cross if spec.kind == "cross" else request.num_named for spec in self.kv.specs]
        held = [blocks[first:] for blocks, first in zip(request.block_ids, known, strict=True)]
        return tuple(tuple(block for block in blocks if block != HOLE) for blocks in held)

    def _find(self, request: Request, parts: Sequence[Atom]) -> Blocks:
        """Known full blocks that the sequence begins with, and those of its encoder side if all are there.

        The last token is always computed, in a block of the sequence's own: its logits are wanted. So are those of all tokens
        where prompt_logprobs are.
        """
        if not self.caching or request.message.params.prompt_logprobs is not None:
            return self.kv.empty
        size, cross = self.kv.block_size, self._cross_keys(request)
        keys = request.block_keys(size)[: (len(request.token_ids) - 1) // size]
        found = []
        for pool, spec in zip(self.kv.pools, self.kv.specs, strict=True):
            if spec.window is not None:
                found.append(tuple(pool.find_each(keys)))
            else:
                found.append(tuple(pool.find(cross if spec.kind == "cross" else keys)))
        keep = self._whole(found, parts)
        return tuple(
            (held if len(held) == len(cross) else ())
            if spec.kind == "cross"
            else (HOLE,) * self._first(spec.window, keep * size) + held[self._first(spec.window, keep * size) : keep]
            for held, spec in zip(found, self.kv.specs, strict=True)
        )

    def _whole(self, found: Sequence[tuple[int, ...]], parts: Sequence[Atom]) -> int:
        """Blocks of the longest beginning that cuts no atom and of which every group has what comes next to it."""
        size = self.kv.block_size
        groups = [(held, spec.window) for held, spec in zip(found, self.kv.specs, strict=True) if spec.kind != "cross"]
        keep = min((len(held) for held, _ in groups), default=0)
        while keep:
            keep = round_down(keep * size, size, parts) // size
            lacks = [
                index
                for held, window in groups
                for index in range(self._first(window, keep * size), keep)
                if held[index] == HOLE
            ]
            if not lacks:
                return keep
            keep = max(lacks)
        return 0

    def _first(self, window: int | None, position: int) -> int:
        """The first block that a token at `position` sees."""
        return 0 if window is None else max(0, position - window + 1) // self.kv.block_size

    def _lengths(self, request: Request, start: int, tokens: int | None = None) -> list[int]:
        """Slots that are needed, per group, for `tokens` (None: all known ones) of which those from `start` come next."""
        tokens = len(request.token_ids) if tokens is None else tokens
        near = min(tokens, start + self._rows)
        lengths = {"cross": request.cross_rows, "window": near}
        return [lengths.get(spec.kind, tokens) for spec in self.kv.specs]

    def _cross_keys(self, request: Request) -> list[bytes]:
        return cross_keys(request.root, -(-request.cross_rows // self.kv.block_size))

    def _of_tokens(self, request: Request) -> list[tuple[tuple[int, ...], BlockPool, int | None]]:
        """Blocks, pool and window of every group with a slot per token."""
        groups = zip(request.block_ids, self.kv.pools, self.kv.specs, strict=True)
        return [(held, pool, spec.window) for held, pool, spec in groups if spec.kind != "cross"]
