"""The eight orientations of pictures, by the numbers of EXIF (CIPA DC-008, Orientation): views that turn and flip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_Pixels = np.ndarray[Any, Any]
_AS_STORED: dict[int, Callable[[_Pixels], _Pixels]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}
_INVERSES = {6: 8, 8: 6}  # the others are their own


def has_swapped_sides(orientation: int) -> bool:
    """Return whether the stored rows are the columns of the upright picture."""
    return orientation >= 5


def as_stored(pixels: _Pixels, orientation: int) -> _Pixels:
    """Return a view `[height, width, ...]` of upright pixels in the order in which they are stored."""
    return _AS_STORED[orientation](pixels)


def upright(pixels: _Pixels, orientation: int) -> _Pixels:
    """Return a view `[height, width, ...]` of stored pixels as they are shown."""
    return _AS_STORED[_INVERSES.get(orientation, orientation)](pixels)
