"""Normalisation of pixels, and their layout as planes or as patches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PatchLayout:
    """The layout of the output: planes `[n, 3, h, w]` if `patch` is 0, else patches.

    Patches are rows `[patches, 3 * temporal * patch * patch]`. The patches of a merge x merge square are adjacent, and squares
    follow line by line. Within a row the order is channel, frame, line, column. `temporal` frames make one patch; the last
    frame is repeated to fill the last group.
    """

    patch: int = 0
    merge: int = 1
    temporal: int = 1


@dataclass(frozen=True)
class Normalization:
    """Per-channel normalisation `(pixel - mean) / std` in float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
