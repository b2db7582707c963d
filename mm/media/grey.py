"""Convert grey of 16 and 32 bits to bytes. The pixels of a 32-bit image say which value is white, since its mode does not."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from ...callers.errors import InputError

_SCALES = {"F": (1.0, 255.0, 65535.0), "I": (255.0, 65535.0)}  # values of white, by mode
_OVERSHOOT = 0.25  # of white: how far resizing may push the values of sharp edges out of the range; they are clipped
_STRIP_PIXELS = 1 << 18  # searched at a time


def grey_scale(image: Image.Image) -> float:
    """Return which value is white in an image of mode "I" or "F": the smallest usual one that its pixels do not exceed.

    Raises:
        InputError: the pixels exceed all of them, or are negative.
    """
    least, largest = _range(image)
    scales = _SCALES[image.mode]
    over = _OVERSHOOT if image.mode == "F" else 0.0  # integers are not resized with overshoot
    white = next((scale for scale in scales if largest <= scale * (1 + over)), None)
    if white is not None and least >= -_OVERSHOOT * white:
        return white
    ranges = " or ".join(f"0 to {scale:.0f}" for scale in scales)
    kind = "32-bit floating-point" if image.mode == "F" else "32-bit"
    raise InputError(
        f"its pixels reach from {least:,.8g} to {largest:,.8g}, but {kind} grey must be {ranges}; scale it, or save it as 8-bit"
    )


def grey_bytes(grey: np.ndarray[Any, Any], white: float) -> np.ndarray[Any, Any]:
    """Return grey `[height, width]` as uint8, where `white` becomes 255. 16 bits become their upper byte."""
    if grey.dtype.kind == "f":
        grey = np.nan_to_num(grey)
    if white == 1.0:
        return np.asarray(np.rint(grey.clip(0, 1) * 255), np.uint8)
    if white == 255.0:
        return grey.clip(0, 255).astype(np.uint8)
    upper: np.ndarray[Any, Any] = grey.clip(0, 65535).astype(np.uint16) >> 8
    return upper.astype(np.uint8)


def _range(image: Image.Image) -> tuple[float, float]:
    """Return the least and the largest finite value, or zeros if there is none."""
    least, largest = np.inf, -np.inf
    lines = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, lines):
        strip = np.asarray(image.crop((0, top, image.width, min(image.height, top + lines))))
        finite = strip[np.isfinite(strip)]
        if finite.size:
            least, largest = min(least, finite.min()), max(largest, finite.max())
    return (float(least), float(largest)) if least <= largest else (0.0, 0.0)
