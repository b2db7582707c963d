"""Which blocks a sequence lives in, and which of them it shares with others. Knows no step and no budget."""

from __future__ import annotations

from collections.abc import Sequence

from .atoms import Atom, round_down
from .kv import BlockPool, Blocks, KVBlocks
from .prefix_cache import cross_keys
from .request import Request


class BlockTables:
    """Blocks of sequences over all cache groups.

    A sequence begins in the full blocks that earlier ones left behind; a block becomes known once all its tokens are computed.

    Args:
        kinds: of each group of `kv`: "full", a slot per token, or "cross", a slot per row of the encoder side.
        caching: whether blocks are shared at all.
    """

    def __init__(self, kv: KVBlocks, kinds: Sequence[str], caching: bool) -> None:
        self.kv, self.kinds, self.caching = kv, tuple(kinds), caching
        self.queries = self.hits = 0  # tokens of placed sequences, and how many of them were there

    def place(self, request: Request, parts: Sequence[Atom]) -> bool:
        """Room for all known tokens of a sequence without blocks, the first of them shared; False for too little."""
        found = self._find(request, parts)
        for held, pool in zip(found, self.kv.pools, strict=True):
            pool.share(held)
        blocks = self.kv.grow(found, self._lengths(request))
        if blocks is None:
            self.kv.shrink(found, [0] * len(self.kinds))
            return False
        request.block_ids = blocks
        full = max((len(held) for held in self._of("full", found)), default=0)
        request.rewind(full * self.kv.block_size)
        request.num_named = full
        request.cross_done = not request.cross_rows or all(self._of("cross", found))
        self.queries += len(request.token_ids)
        self.hits += request.num_computed
        return True

    def grow(self, request: Request) -> bool:
        """Room for all known tokens of a sequence that has blocks; False for too little."""
        blocks = self.kv.grow(request.block_ids, self._lengths(request))
        request.block_ids = blocks or request.block_ids
        return blocks is not None

    def drop(self, request: Request) -> None:
        """All blocks lose this user, and the sequence what was computed."""
        request.block_ids = self.kv.shrink(request.block_ids, [0] * len(self.kinds))
        request.rewind(0)
        request.num_named, request.cross_done = 0, not request.cross_rows

    def roll_back(self, request: Request) -> None:
        """After the sequence lost its end: the block it now ends in is written again, by whoever owns it alone."""
        size, first = self.kv.block_size, request.num_computed // self.kv.block_size
        request.block_ids = self.kv.shrink(request.block_ids, self._lengths(request))
        again = [(pool, block) for held, pool in self._full(request) for block in held[first:]]
        if any(pool.is_shared(block) for pool, block in again):
            request.rewind(first * size)
            request.block_ids = self.kv.shrink(request.block_ids, self._lengths(request, first * size))
        else:
            for pool, block in again:
                pool.forget(block)
        request.num_named = min(request.num_named, first)

    def name(self, request: Request) -> None:
        """Full blocks that are computed can be found from now on."""
        done = request.num_computed // self.kv.block_size
        if not self.caching or done <= request.num_named:
            return
        keys = request.block_keys(self.kv.block_size)
        for held, pool in self._full(request):
            for index in range(request.num_named, done):
                pool.name(held[index], keys[index])
        request.num_named = done

    def name_cross(self, request: Request) -> None:
        """The same for the encoder side, which is written at once."""
        request.cross_done = True
        for held, pool, kind in zip(request.block_ids, self.kv.pools, self.kinds, strict=True):
            if kind == "cross" and self.caching:
                for block, key in zip(held, self._cross_keys(request), strict=True):
                    pool.name(block, key)

    def unnamed(self, request: Request) -> Blocks:
        """Blocks whose content nobody vouches for."""
        known = {"full": request.num_named, "cross": len(self._cross_keys(request)) if request.cross_done else 0}
        return tuple(held[known[kind] :] for held, kind in zip(request.block_ids, self.kinds, strict=True))

    def _find(self, request: Request, parts: Sequence[Atom]) -> Blocks:
        """Known full blocks that the sequence begins with, and those of its encoder side if all are there.

        The last token is always computed, in a block of the sequence's own: its logits are wanted. So are those of all tokens
        where prompt_logprobs are.
        """
        if not self.caching or request.message.params.prompt_logprobs is not None:
            return self.kv.empty
        size, cross = self.kv.block_size, self._cross_keys(request)
        keys = request.block_keys(size)[: (len(request.token_ids) - 1) // size]
        wanted = [keys if kind == "full" else cross for kind in self.kinds]
        found = tuple(tuple(pool.find(chain)) for pool, chain in zip(self.kv.pools, wanted, strict=True))
        shortest = min((len(held) for held in self._of("full", found)), default=0)
        keep = round_down(shortest * size, size, parts) // size
        return tuple(
            held[:keep] if kind == "full" else held if len(held) == len(cross) else ()
            for held, kind in zip(found, self.kinds, strict=True)
        )

    def _lengths(self, request: Request, num_tokens: int | None = None) -> list[int]:
        """Slots that are needed, per group."""
        tokens = len(request.token_ids) if num_tokens is None else num_tokens
        return [tokens if kind == "full" else request.cross_rows for kind in self.kinds]

    def _cross_keys(self, request: Request) -> list[bytes]:
        return cross_keys(request.root, -(-request.cross_rows // self.kv.block_size))

    def _full(self, request: Request) -> list[tuple[tuple[int, ...], BlockPool]]:
        groups = zip(request.block_ids, self.kv.pools, self.kinds, strict=True)
        return [(held, pool) for held, pool, kind in groups if kind == "full"]

    def _of(self, kind: str, blocks: Blocks) -> list[tuple[int, ...]]:
        return [held for held, other in zip(blocks, self.kinds, strict=True) if other == kind]
