"""The types that travel: items, geometry, placeholders, features. Knows no model and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .fields import FieldElem

MultiModalKwargsItem = Mapping[str, FieldElem]
"""Everything the encoder needs for one item, by tensor name."""


@dataclass(frozen=True)
class ImageItem:
    """One decoded picture. `pixels` uint8 `[height, width, 3]` RGB, EXIF orientation applied, alpha on white."""

    pixels: Tensor
    hash: str
    uuid: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        """`(height, width)` in pixels."""
        return int(self.pixels.shape[0]), int(self.pixels.shape[1])


@dataclass(frozen=True)
class VideoItem:
    """The sampled frames of one clip. `frames` uint8 `[frames, height, width, 3]` RGB.

    `timestamps` are seconds from the start of the source, one per frame used; `fps` is the rate of the *sampled*
    frames (frames used per second of source), from which position rules derive seconds per grid step.
    """

    frames: Tensor
    timestamps: tuple[float, ...]
    fps: float
    hash: str
    uuid: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        """`(height, width)` in pixels."""
        return int(self.frames.shape[1]), int(self.frames.shape[2])


MediaItem = ImageItem | VideoItem


@dataclass(frozen=True)
class ItemGeometry:
    """The grid of one item, in patches *before* merging, from which tokens, rows and positions all follow.

    Args:
        t, h, w: temporal grid steps, patches high, patches wide.
        merge: patches merged to one embedding along h and along w.
        time_step: positions per temporal grid step; the product with the step index is cut to an integer.
    """

    t: int
    h: int
    w: int
    merge: int = 1
    time_step: float = 1.0

    @property
    def merged(self) -> tuple[int, int, int]:
        """`(t, h, w)` of the embeddings."""
        return self.t, self.h // self.merge, self.w // self.merge

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    @property
    def num_embeds(self) -> int:
        """Rows the encoder returns for this item."""
        return self.num_patches // self.merge**2


@dataclass(frozen=True)
class PlaceholderRange:
    """Where one item sits in the token sequence: `[offset, offset + length)`.

    `is_embed` (bool `[length]`) tells which of those tokens are encoder rows; None means all of them, and is the
    only form used for "all" (a mask that is all true is never built), so that equality and hashing agree.
    """

    offset: int
    length: int
    is_embed: Tensor | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(self.is_embed.sum())

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Encoder rows `[first, last)` used by the tokens `[start, stop)` counted from the range's own start.

        With the mask F T F T T, tokens [3, 5) use rows [1, 3) and tokens [0, 2) use rows [0, 1).
        """
        start, stop = max(0, start), min(self.length, stop)
        if self.is_embed is None:
            return start, max(start, stop)
        return int(self.is_embed[:start].sum()), int(self.is_embed[:stop].sum())

    def mask(self) -> Tensor:
        """Bool `[length]`."""
        return torch.ones(self.length, dtype=torch.bool) if self.is_embed is None else self.is_embed


@dataclass(frozen=True)
class MultiModalFeature:
    """One processed item in its place: the unit that scheduler, caches and positions speak of.

    `hash` is the 256-bit hex key of media content and processing options; equal hash, equal encoder rows.
    """

    modality: str
    kwargs: MultiModalKwargsItem = field(repr=False)
    range: PlaceholderRange
    geometry: ItemGeometry
    hash: str
