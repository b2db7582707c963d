"""The order of keys in the cache of a prompt whose items see each other across text ("bidirectional_media").

A row attends to one range of keys, but a row of the first item sees the later items and not the text before them. The keys are
therefore stored in another order than the tokens. With the texts T0, T1, T2 before the runs of items R1, R2, R3, the order is

    T2 and T1 backwards, T0, R1, R2, R3

in which every row has one range: rows of R2 begin with T1, and all runs end with R3; a row of T2 begins with itself, since the
earlier tokens of T2 follow it, and ends with R2. Later tokens of the sequence come after R3 and see everything before them.
Positions are those of the tokens: rotary embeddings are applied before keys are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, eq=False)
class KeyOrder:
    """Places of the first `n` tokens of a sequence, up to the end of its last item.

    Args:
        places: int64 `[n]`, the place of each token's key and value among those of the sequence.
        key_range: int64 `[2, n]`, first place and end of places that each token attends to.
    """

    places: np.ndarray
    key_range: np.ndarray


def order_keys(runs: Sequence[tuple[int, int]]) -> KeyOrder:
    """Return the order for the runs of items `[first, last)`, ascending; two runs never touch."""
    stop = runs[-1][1]
    places, key_range = np.arange(stop), np.empty((2, stop), dtype=np.int64)
    between = [(last, first) for (_, last), (first, _) in pairwise(runs)]
    place = 0
    starts = [0] * len(runs)  # first place that each run attends to
    for number in range(len(between), 0, -1):
        first, last = between[number - 1]
        starts[number] = place
        places[first:last] = np.arange(place + last - first - 1, place - 1, -1)
        place += last - first
    starts[0] = place
    for first, last in ((0, runs[0][0]), *runs):
        places[first:last] = np.arange(place, place + last - first)
        place += last - first
    key_range[0], key_range[1] = places, places + 1
    key_range[0, : runs[0][0]] = starts[0]
    for start, (first, last) in zip(starts, runs, strict=True):
        key_range[:, first:last] = [[start], [stop]]
    for (first, last), (_, before) in zip(between, runs, strict=False):
        key_range[1, first:last] = places[before - 1] + 1
    return KeyOrder(places, key_range)
