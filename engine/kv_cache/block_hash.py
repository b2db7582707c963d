"""Block hashes of the prefix cache: each covers a block's tokens, the items among them, and the hash of the block before.

Example: an item h1 of 5 tokens is at offset 0 and an item h2 of 5 tokens at 10. Then tokens [0, 6) are hashed with (h1, 0),
[3, 8) with (h1, -3), [6, 10) with no item, and [0, 15) with (h1, 0) and (h2, 10). Two prompts with equal tokens but different
images have different hashes from the image's first block on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from ...mm.types import MultiModalFeature

_BYTES = 32


def hash_root(salt: str, adapter: str, cross: Sequence[str]) -> bytes:
    """Return the start of a chain. Sequences share blocks only if salt, adapter and encoder input are equal.

    Args:
        cross: hashes of the items of the encoder input.
    """
    return _digest(b"root", *(part.encode() for part in (salt, adapter, *cross)))


def hash_cross_blocks(root: bytes, count: int) -> list[bytes]:
    """Return the hashes of the `count` cross-attention blocks of a sequence with this root."""
    return [_digest(b"cross", root, index.to_bytes(4, "little")) for index in range(count)]


def hash_block(parent: bytes, token_ids: Sequence[int], items: Sequence[tuple[str, int]]) -> bytes:
    """Return the hash of a full block. `parent`: hash of the block before it; `items`: result of `items_in_block`."""
    placed = (f"{key}@{offset}".encode() for key, offset in items)
    return _digest(parent, array("q", token_ids).tobytes(), *placed)


def hash_span(token_ids: Sequence[int], items: Sequence[tuple[str, int]]) -> bytes:
    """Return the hash of tokens that attend to each other, which follows the root in a chain."""
    return hash_block(b"span", token_ids, items)


def items_in_block(features: Sequence[MultiModalFeature], start: int, stop: int) -> tuple[tuple[str, int], ...]:
    """Return (hash, offset in the block) of every item that has a token in `[start, stop)`."""
    inside = (f for f in features if f.range.offset < stop and f.range.end > start)
    return tuple((feature.hash, feature.range.offset - start) for feature in inside)


def extend_block_hashes(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], features: Sequence[MultiModalFeature], block_size: int
) -> None:
    """Append the missing hashes of the full blocks of `token_ids` to `hashes`."""
    for index in range(len(hashes), len(token_ids) // block_size):
        start = index * block_size
        items = items_in_block(features, start, start + block_size) if features else ()
        hashes.append(hash_block(hashes[-1] if hashes else root, token_ids[start : start + block_size], items))


def _digest(*parts: bytes) -> bytes:
    """Hash the parts with their lengths, so that two different lists of parts never collide by concatenation."""
    state = blake2b(digest_size=_BYTES, person=b"sensorium.kv")
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
