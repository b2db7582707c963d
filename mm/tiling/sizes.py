"""Arithmetic of sizes and grids that several policies share."""

from __future__ import annotations

import functools
import math

from ...callers.errors import InputError
from .plan import Size


def check_size(height: int, width: int) -> None:
    """Raise InputError if an image of this size has no pixels."""
    if min(height, width) < 1:
        raise InputError(f"an image of {width}x{height} has no pixels")


def fit(height: int, width: int, target: Size, floor: bool = False) -> Size:
    """Return the largest size inside `target` with the image's aspect ratio; the side that does not reach it is rounded up.

    `floor`: it is rounded down, but not to 0.
    """
    if floor:
        if width / height > target[1] / target[0]:
            return max(1, int(target[1] * height / width)), target[1]
        return target[0], max(1, int(target[0] * width / height))
    down, along = target[0] / height, target[1] / width
    if along < down:
        return min(math.ceil(height * along), target[0]), target[1]
    return target[0], min(math.ceil(width * down), target[1])


def unpad(height: int, width: int, grid: Size) -> Size:
    """Return rows and columns of a grid over a padded image that remain after its padding is cut off.

    `height`, `width`: size of the image, in any unit. Both ends lose the same number of rows or columns. Rule: LLaVA-NeXT.
    """
    if width / height > grid[1] / grid[0]:
        kept = int(round(height * (grid[1] / width), 7))
        return grid[0] - (grid[0] - kept) // 2 * 2, grid[1]
    kept = int(round(width * (grid[0] / height), 7))
    return grid[0], grid[1] - (grid[1] - kept) // 2 * 2


def shrink(height: int, width: int, longest: int) -> Size:
    """Return the size with the longer side at most `longest`. The other side is rounded down; for very thin images it is 0."""
    ratio = width / height
    if width >= height and width > longest:
        return int(longest / ratio), longest
    return (longest, int(longest * ratio)) if height > longest else (height, width)


def middle(side: int, crop: int) -> int:
    """Return where a centered crop starts. If the side is too short, the odd pixel of padding is at the end."""
    return int((side - crop) / 2) if side >= crop else -((crop - side) // 2)


def nearest_multiple(side: float, multiple: int) -> int:
    """Return the nearest multiple, at least one."""
    return max(1, round(side / multiple)) * multiple


def round_up(side: float, multiple: int) -> int:
    """Return the next multiple, at least one."""
    return max(1, math.ceil(side / multiple)) * multiple


def anyres_score(height: int, width: int, size: Size) -> tuple[int, int]:
    """Return `(pixels kept, -pixels wasted)` of an image in a size."""
    scale = min(size[1] / width, size[0] / height)
    effective = min(int(width * scale) * int(height * scale), width * height)
    return effective, effective - size[0] * size[1]


@functools.lru_cache(64)
def arrangements(min_tiles: int, max_tiles: int) -> tuple[Size, ...]:
    """Return all `(rows, columns)` of `min_tiles` to `max_tiles` tiles, by number of tiles and then by columns."""
    each = ((rows, columns) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles // columns + 1))
    return tuple(sorted((grid for grid in each if grid[0] * grid[1] >= min_tiles), key=lambda grid: grid[0] * grid[1]))


@functools.lru_cache(64)
def grids_by_ratio(max_tiles: int) -> tuple[Size, ...]:
    """Return all (rows, columns) of at most `max_tiles` tiles, from most tiles on, each followed by those of equal ratio."""
    groups: dict[float, list[Size]] = {}
    for rows, columns in sorted(grids_by_rows(max_tiles), key=lambda grid: -grid[0] * grid[1]):
        groups.setdefault(rows / columns, []).append((rows, columns))
    return tuple(grid for group in groups.values() for grid in group)


@functools.lru_cache(64)
def grids_by_rows(max_tiles: int) -> tuple[Size, ...]:
    """Return all (rows, columns) of at most `max_tiles` tiles, by rows and then by columns."""
    return tuple((rows, columns) for rows in range(1, max_tiles + 1) for columns in range(1, max_tiles // rows + 1))


def whole_multiples(size: Size, step: int) -> Size:
    """Return both sides rounded down to multiples of `step`; the size itself if a side is shorter than that."""
    tall, wide = (side // step * step for side in size)
    return (tall, wide) if tall and wide else size
