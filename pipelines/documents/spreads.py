"""Finds scans that show two pages of a book side by side, which a model reads one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .line_recognizer import Picture

RATIOS = (1.2, 1.8)
"""Width over height of a picture that may show two pages."""
_WIDTH = 400  # pixels to which the picture is reduced
_CONTRAST = 40  # difference in brightness, of 255, between ink and paper
_MIDDLE = (0.42, 0.58)  # where two pages meet, as shares of the width
_GAP = 0.03  # least width of the margins between two pages, as a share of the width
_FOLD = 0.5  # share of dark pixels from which a column is the shadow of a fold
_DUST = 0.002  # share of dark pixels up to which a column is empty
_WORD_GAP = 5  # pixels between two words of one line, at most
_FILLED = 0.6  # share of the text's width that half of its lines fill; lines of tables fill less
_LEAST_ROWS = 0.2  # share of the height on which each page has ink


def gutter_of(pixels: Picture) -> int | None:
    """Return where two pages meet, in pixels from the left; None if a picture does not show two pages of running text.

    Args:
        pixels: uint8 `[height, width, 3]`.
    """
    import cv2

    height, width = (int(side) for side in pixels.shape[:2])
    if not RATIOS[0] < width / height < RATIOS[1] or width < _WIDTH:
        return None
    small = cv2.resize(pixels, (_WIDTH, max(round(_WIDTH * height / width), 1)), interpolation=cv2.INTER_AREA)
    grey = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY).astype(np.float32)
    ink = grey < float(np.percentile(grey, 80)) - _CONTRAST  # [rows, _WIDTH]
    shares = ink.mean(axis=0)
    first, last = (round(share * _WIDTH) for share in _MIDDLE)
    is_free = (shares <= _DUST) | (shares >= _FOLD)
    start, stop = _longest_run(is_free[first:last])
    if stop - start < _GAP * _WIDTH:
        return None
    middle = first + (start + stop) // 2
    if not (_is_text(ink[:, : first + start]) and _is_text(ink[:, first + stop :])):
        return None
    return int(middle * width / _WIDTH)


def _longest_run(values: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the start and the end of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], values, [False])).astype(np.int8)))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return max(runs, key=lambda run: run[1] - run[0], default=(0, 0))


def _is_text(ink: NDArray[np.bool_]) -> bool:
    """Return whether half of the rows with ink fill most of its width, as running text does. `ink`: `[rows, columns]`."""
    import cv2

    kernel = np.ones((1, _WORD_GAP), np.uint8)
    closed = cv2.morphologyEx(ink.astype(np.uint8), cv2.MORPH_CLOSE, kernel).astype(bool)
    rows = closed[closed.any(axis=1)]
    if len(rows) < _LEAST_ROWS * len(ink):
        return False
    columns = np.flatnonzero(rows.any(axis=0))
    return float(np.median(rows.sum(axis=1))) >= _FILLED * int(columns[-1] - columns[0] + 1)
