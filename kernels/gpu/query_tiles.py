"""How the rows of a step are cut into tiles, and how many parts the keys of a tile are cut into. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..metadata import AttentionMetadata

MOST_PARTS = 64
_NEAR = 0.85  # of the best balance that any number of parts would give: fewer parts are joined faster


@dataclass(frozen=True, eq=False)
class Tiles:
    """Some of a step's rows, in tiles of one request each.

    Args:
        table: int32 `[count, 2]`, request of each and the first of its rows, long ones first; None: tile i is request i.
        count: how many.
        longest: keys that the longest of them sees.
        keys: keys that all of them see together.
    """

    table: Tensor | None
    count: int
    longest: int
    keys: int


def tiles_of(meta: AttentionMetadata, few: int, many: int) -> tuple[Tiles, Tiles]:
    """Requests of up to `few` rows as one tile each, the others in tiles of `many` rows; laid out once for all layers."""
    if (few, many) not in meta.layouts:
        meta.layouts[few, many] = _lay_out(meta, few, many)
    return meta.layouts[few, many]  # type: ignore[no-any-return]


def _lay_out(meta: AttentionMetadata, few: int, many: int) -> tuple[Tiles, Tiles]:
    counts = np.diff(meta.query_start)
    short, long = np.flatnonzero((counts > 0) & (counts <= few)), np.flatnonzero(counts > few)
    tiles = -(-counts[long] // many)
    offsets = many * (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    return _tiles(meta, short, np.zeros_like(short), few), _tiles(meta, np.repeat(long, tiles), offsets, many)


def _tiles(meta: AttentionMetadata, requests: np.ndarray, offsets: np.ndarray, rows: int) -> Tiles:
    """Tiles of up to `rows` rows, from the row `offset` of each request on."""
    if not len(requests):
        return Tiles(None, 0, 0, 0)
    keys = np.array(meta.seq_lens)[requests]
    if meta.causal:
        counts = np.diff(meta.query_start)[requests]
        keys = keys - counts + np.minimum(offsets + rows, counts)
    if meta.window is not None:
        keys = keys.clip(max=meta.window + rows)
    table = None
    if len(requests) != len(meta.seq_lens) or offsets.any():
        longest_first = np.argsort(-keys, kind="stable")
        pairs = np.stack((requests, offsets), 1)[longest_first]
        table = meta.on_device(torch.from_numpy(pairs.astype(np.int32)))
    return Tiles(table, len(requests), int(keys.max()), int(keys.sum()))


@lru_cache(maxsize=256)
def parts(tiles: float, longest: int, slots: int) -> int:
    """Of how many parts the keys of every tile should be, so that `slots` programs at a time are all busy to the end.

    Args:
        tiles: of the longest tile's size that there are.
        longest: parts that tile can be cut into at most.
    """
    able = range(1, max(1, min(MOST_PARTS, longest)) + 1)
    busy = [tiles * n / slots / -(-tiles * n // slots) for n in able]
    return next(n for n, share in zip(able, busy, strict=True) if share >= _NEAR * max(busy))
