"""Prompt attention of Molmo2: the tokens of all images and videos see each other, whatever text is between them.

A row attends to one range of keys, but a row of the first item sees the later items and not the text before them. The keys are
therefore stored in another order than the tokens. With the texts T0, T1, T2 before the runs of items R1, R2, R3, the order is

    T2 and T1 backwards, T0, R1, R2, R3

in which every row has one range: rows of R2 begin with T1, and all runs end with R3; a row of T2 begins with itself, since the
earlier tokens of T2 follow it, and ends with R2. Later tokens of the sequence come after R3 and see everything before them.
Positions are those of the tokens: rotary embeddings are applied before keys are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ....mm.embeddings import PROMPT_EMBEDS
from ....mm.rules import KeyOrder, register
from ....mm.types import MultiModalFeature


@register
def media_span(prompt_length: int, features: Sequence[MultiModalFeature]) -> list[tuple[int, int]]:
    """Return one span from the start of the prompt to the end of the last item; the item itself, if there is one."""
    runs = media_runs(features)
    return runs if len(runs) < 2 else [(0, runs[-1][1])]


@register
def order_keys(features: Sequence[MultiModalFeature]) -> KeyOrder | None:
    """Return the order of the keys; None if there is at most one run of items."""
    runs = media_runs(features)
    return order_runs(runs) if len(runs) > 1 else None


def media_runs(features: Sequence[MultiModalFeature]) -> list[tuple[int, int]]:
    """Return the runs of adjacent tokens of items, `[first, last)` in order. Runs of different items that touch are one run."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(run for feature in features if feature.modality != PROMPT_EMBEDS for run in feature.range.runs):
        touches = bool(joined) and joined[-1][1] == first
        joined[-1 if touches else len(joined) :] = [(joined[-1][0] if touches else first, last)]
    return joined


def order_runs(runs: Sequence[tuple[int, int]]) -> KeyOrder:
    """Return the order for the runs of items `[first, last)`, ascending; two runs never touch."""
    stop = runs[-1][1]
    places, key_range = np.arange(stop), np.empty((2, stop), dtype=np.int64)
    between = [(last, first) for (_, last), (first, _) in pairwise(runs)]
    position = 0
    starts = [0] * len(runs)  # first place that each run attends to
    for number in range(len(between), 0, -1):
        first, last = between[number - 1]
        starts[number] = position
        places[first:last] = np.arange(position + last - first - 1, position - 1, -1)
        position += last - first
    starts[0] = position
    for first, last in ((0, runs[0][0]), *runs):
        places[first:last] = np.arange(position, position + last - first)
        position += last - first
    key_range[0], key_range[1] = places, places + 1
    key_range[0, : runs[0][0]] = starts[0]
    for start, (first, last) in zip(starts, runs, strict=True):
        key_range[:, first:last] = [[start], [stop]]
    for (first, last), (_, before) in zip(between, runs, strict=False):
        key_range[1, first:last] = places[before - 1] + 1
    return KeyOrder(places, key_range)
