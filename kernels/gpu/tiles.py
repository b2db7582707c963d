"""How the rows of a step are cut into tiles, and how many parts the keys of a tile are cut into. Knows no kernel."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..metadata import AttentionMetadata

_MOST_PARTS = 64
_NEAR = 0.85  # of the best balance that any number of parts would give: fewer parts are joined faster


class Tiles(NamedTuple):
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
    starts, lengths = np.array(meta.query_start), np.array(meta.seq_lens)
    counts = np.diff(starts)
    short, long = np.flatnonzero((counts > 0) & (counts <= few)), np.flatnonzero(counts > few)
    whole = len(short) == len(counts)
    narrow = _tiles(meta, short, np.zeros_like(short), counts, lengths, few)
    tiles = -(-counts[long] // many)
    offsets = many * (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    wide = _tiles(meta, np.repeat(long, tiles), offsets, counts, lengths, many)
    return narrow._replace(table=None) if whole else narrow, wide


def _tiles(
    meta: AttentionMetadata, requests: np.ndarray, offsets: np.ndarray, counts: np.ndarray, lengths: np.ndarray, rows: int
) -> Tiles:
    if not len(requests):
        return Tiles(None, 0, 0, 0)
    counts, keys = counts[requests], lengths[requests]
    if meta.causal:
        keys = keys - counts + np.minimum(offsets + rows, counts)
    if meta.window is not None:
        keys = keys.clip(max=meta.window + rows)
    order = np.argsort(-keys, kind="stable")
    table = torch.from_numpy(np.stack((requests, offsets), 1)[order].astype(np.int32))
    return Tiles(meta.on_device(table), len(requests), int(keys.max()), int(keys.sum()))


@cache
def parts(tiles: float, longest: int, slots: int) -> int:
    """Of how many parts the keys of every tile should be, so that `slots` programs at a time are all busy to the end.

    Args:
        tiles: of the longest tile's size that there are.
        longest: parts that tile can be cut into at most.
    """
    able = range(1, max(1, min(_MOST_PARTS, longest)) + 1)
    busy = [tiles * n / slots / -(-tiles * n // slots) for n in able]
    return next(n for n, share in zip(able, busy, strict=True) if share >= _NEAR * max(busy))
