"""Query tiles of a step for paged attention, and the number of splits of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..metadata import AttentionMetadata

MAX_SPLITS = 64
_NEAR = 0.85  # share of the best balance that is good enough, because fewer splits are combined faster


@dataclass(frozen=True, eq=False)
class QueryTiles:
    """Tiles of some of a step's rows. A tile's rows are of one request.

    Args:
        table: int32 `[count, 2]`: request and first row of each tile, longest context first; None: tile i is request i.
        count: number of tiles.
        longest: keys of the tile with the most keys.
        keys: keys of all tiles together.
    """

    table: Tensor | None
    count: int
    longest: int
    keys: int


def query_tiles_of(meta: AttentionMetadata, few: int, many: int) -> tuple[QueryTiles, QueryTiles]:
    """Tile requests of up to `few` rows whole, the others in tiles of `many` rows. Computed once per step for all layers."""
    tiles: tuple[QueryTiles, QueryTiles] | None = meta.backend_cache.get((few, many))
    if tiles is None:
        meta.backend_cache[few, many] = tiles = _lay_out(meta, few, many)
    return tiles


def _lay_out(meta: AttentionMetadata, few: int, many: int) -> tuple[QueryTiles, QueryTiles]:
    counts = np.diff(meta.query_start_loc)
    short, long = np.flatnonzero((counts > 0) & (counts <= few)), np.flatnonzero(counts > few)
    tiles = -(-counts[long] // many)
    offsets = many * (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    return _tiles(meta, short, np.zeros_like(short), few), _tiles(meta, np.repeat(long, tiles), offsets, many)


def _tiles(meta: AttentionMetadata, requests: np.ndarray, offsets: np.ndarray, rows: int) -> QueryTiles:
    """Make a tile of up to `rows` rows for each request and the offset of its first row in it."""
    if not len(requests):
        return QueryTiles(None, 0, 0, 0)
    keys = np.array(meta.seq_lens)[requests]
    if meta.causal:
        counts = np.diff(meta.query_start_loc)[requests]
        keys = keys - counts + np.minimum(offsets + rows, counts)
    if meta.window is not None:
        keys = keys.clip(max=meta.window + rows)
    table = None
    if len(requests) != len(meta.seq_lens) or offsets.any():
        longest_first = np.argsort(-keys, kind="stable")
        pairs = np.stack((requests, offsets), 1)[longest_first]
        table = meta.on_device(torch.from_numpy(pairs.astype(np.int32)))
    return QueryTiles(table, len(requests), int(keys.max()), int(keys.sum()))


@lru_cache(maxsize=256)
def num_splits(tiles: float, longest: int, slots: int) -> int:
    """Return the number of key splits per tile that keeps `slots` concurrent programs busy to the end.

    Args:
        tiles: number of tiles, counted in tiles of the longest size.
        longest: the most splits that the longest tile can have.
    """
    able = range(1, max(1, min(MAX_SPLITS, longest)) + 1)
    busy = [tiles * n / slots / -(-tiles * n // slots) for n in able]
    return next(n for n, share in zip(able, busy, strict=True) if share >= _NEAR * max(busy))
