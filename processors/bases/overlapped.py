"""Groups of patches that are pooled to one encoder row: of an image in overlapping tiles, or of a frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...mm.tiling.overlapped import OverlappedTiles


def number_patches(tiles: OverlappedTiles, rows: int, columns: int) -> np.ndarray:
    """Return the number of the patch at each place of the resized image: int64 `[tall, wide]`.

    Patches are numbered tile by tile. Where tiles overlap, the place belongs to the tile in whose margin it is not.
    """
    side, (start, end) = tiles.side, tiles.margins
    numbers = np.empty(tiles.canvas(rows, columns), dtype=np.int64)
    tile = np.arange(side * side).reshape(side, side)
    for row in range(rows):
        for column in range(columns):
            tall = slice(start if row else 0, side - (end if row + 1 < rows else 0))
            wide = slice(start if column else 0, side - (end if column + 1 < columns else 0))
            top, left = row * tiles.step, column * tiles.step
            at = slice(top + tall.start, top + tall.stop), slice(left + wide.start, left + wide.stop)
            numbers[at] = tile[tall, wide] + (row * columns + column) * side * side
    return numbers


def group_patches(numbers: np.ndarray, pool: Sequence[int]) -> np.ndarray:
    """Return the groups of pool[0] x pool[1] patches: int64 `[tall, wide, patches of a group]`, -1 where a group has fewer.

    What is missing to full groups is added around the grid, half of it (rounded down) at the top and at the left.
    """
    missing = [-side % size for side, size in zip(numbers.shape, pool, strict=True)]
    padded = np.pad(numbers, [(count // 2, count - count // 2) for count in missing], constant_values=-1)
    tall, wide = (side // size for side, size in zip(padded.shape, pool, strict=True))
    return padded.reshape(tall, pool[0], wide, pool[1]).transpose(0, 2, 1, 3).reshape(tall, wide, -1)


def mark_groups(groups: np.ndarray, line_ends: bool) -> np.ndarray:
    """Return `[rows, patches of a group]` with rows of -1 for a start token, an end token and, if asked for, line ends."""
    around = ((0, 0), (0, int(line_ends)), (0, 0))
    lines = np.pad(groups, around, constant_values=-1).reshape(-1, groups.shape[2])
    return np.pad(lines, ((1, 1), (0, 0)), constant_values=-1)
