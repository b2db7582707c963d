"""Which blocks a sequence needs to continue after a cached prefix, and how long that prefix can be."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.interface import CacheSpec
from ..bidirectional_spans import BidirectionalSpan, round_down
from .block_pool import NULL_BLOCK


def first_visible(spec: CacheSpec, position: int, block_size: int) -> int:
    """Return the first block that the token at `position` sees."""
    if spec.window is None:
        return 0
    first = position - position % spec.window if spec.kind == "chunk" else max(0, position - spec.window + 1)
    return first // block_size


def needed_blocks(spec: CacheSpec, num_blocks: int, block_size: int) -> range:
    """Return which of its first `num_blocks` blocks of tokens a sequence needs in a group to continue after them.

    Of the states, the last one sums up the others.
    """
    first = max(0, num_blocks - 1) if spec.kind == "state" else first_visible(spec, num_blocks * block_size, block_size)
    return range(first, num_blocks)


def usable_prefix(
    cached: Sequence[Sequence[int]], specs: Sequence[CacheSpec], block_size: int, spans: Sequence[BidirectionalSpan]
) -> int:
    """Return the size in blocks of the longest prefix that cuts no span and whose needed blocks are cached.

    Args:
        cached: the blocks of each group in order. Groups with a window or states may have gaps (NULL_BLOCK); of others, it is
            the longest prefix without gaps. Groups of kind "cross" do not count.
    """
    groups = [pair for pair in zip(cached, specs, strict=True) if pair[1].kind != "cross"]
    keep = min((len(blocks) for blocks, _ in groups), default=0)
    with_gaps = [(blocks, spec) for blocks, spec in groups if spec.window is not None or spec.kind == "state"]
    while keep:
        keep = round_down(keep * block_size, block_size, spans) // block_size
        missing = [
            index
            for blocks, spec in with_gaps
            for index in needed_blocks(spec, keep, block_size)
            if blocks[index] == NULL_BLOCK
        ]
        if not missing:
            return keep
        keep = max(missing)
    return 0
