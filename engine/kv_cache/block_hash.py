"""What a block of keys and values is known by: a chain of hashes over tokens and items. Holds no block.

Example: items of 5 tokens at 0 (h1) and of 5 at 10 (h2). Tokens [0, 6) are followed by (h1, 0), [3, 8) by (h1, -3), [6, 10) by
nothing, [0, 15) by (h1, 0) and (h2, 10). The same tokens around another picture differ from the block where it begins.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from ..mm.types import MultiModalFeature

_BYTES = 32


def root_key(salt: str, adapter: str, cross: str) -> bytes:
    """Where a chain begins: sequences that differ in tenant, adapter or encoder side share nothing."""
    return _digest(b"root", *(part.encode() for part in (salt, adapter, cross)))


def cross_keys(root: bytes, count: int) -> list[bytes]:
    """Keys of the `count` blocks that hold the keys and values of the encoder side that `root` was made with."""
    return [_digest(b"cross", root, index.to_bytes(4, "little")) for index in range(count)]


def block_key(parent: bytes, token_ids: Sequence[int], items: Sequence[tuple[str, int]]) -> bytes:
    """Of a full block: `parent` is the key of the block before it, `items` what `block_items` says of it."""
    placed = (f"{key}@{offset}".encode() for key, offset in items)
    return _digest(parent, array("q", token_ids).tobytes(), *placed)


def block_items(features: Sequence[MultiModalFeature], start: int, stop: int) -> tuple[tuple[str, int], ...]:
    """(hash, offset in the block) of every item that has a token in `[start, stop)`."""
    inside = (f for f in features if f.range.offset < stop and f.range.end > start)
    return tuple((feature.hash, feature.range.offset - start) for feature in inside)


def extend_keys(
    keys: list[bytes], root: bytes, token_ids: Sequence[int], features: Sequence[MultiModalFeature], block_size: int
) -> None:
    """Append the keys of all full blocks of `token_ids` that `keys` lacks."""
    for index in range(len(keys), len(token_ids) // block_size):
        start = index * block_size
        items = block_items(features, start, start + block_size) if features else ()
        keys.append(block_key(keys[-1] if keys else root, token_ids[start : start + block_size], items))


def _digest(*parts: bytes) -> bytes:
    """Over the parts and their lengths, so that no two lists of parts read the same."""
    state = blake2b(digest_size=_BYTES, person=b"sensorium.kv")
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
