"""The types that travel: items, geometry, placeholders, features. Knows no model and no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from .fields import FieldElem

MultiModalKwargsItem = Mapping[str, FieldElem]
"""Everything the encoder needs for one item, by tensor name."""


@dataclass(frozen=True)
class Media:
    """One input with a name or options of its own, wherever plain data may stand: `Media(image, max_pixels=100_000)`.

    Args:
        data: the picture, clip, sound or embeddings in any form that is taken; None: you have it already, see `uuid`.
        uuid: the caller's own name of this content.
        min_pixels, max_pixels: area of a picture or frame after resizing.
        fps, num_frames: frames used of a clip; one excludes the other.
        detail: "low" (at most 512x512 pixels), "high" or "auto" (the model's own limits).
    """

    data: object
    uuid: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    detail: str | None = None

    @property
    def options(self) -> dict[str, object]:
        """What was given, by name."""
        names = ("min_pixels", "max_pixels", "fps", "num_frames", "detail")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class FramePlan:
    """Which frames of a clip are used, in order of time; one entry of `indices` and `timestamps` per frame used.

    Args:
        indices: frame numbers in the source, in presentation order.
        timestamps: seconds of those frames from the start of the source, as the container says.
        total: frames of the source.
        fps: frames used per second of source, from which position rules derive seconds per grid step.
        replaced: `(wanted, used)` frame numbers where a broken frame has a stand-in.
        missing: wanted frame numbers that could not be read and have none.
    """

    indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    total: int
    fps: float
    replaced: tuple[tuple[int, int], ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class MediaHeader:
    """What is known of one item before anything is decoded, and what stays true of it afterwards.

    Args:
        modality: "image", "video", "audio" or "vision_chunk".
        height, width: pixels, after EXIF orientation; 0 for sound.
        frames: the frames to be used, None but for clips.
        samples: mono samples at the rate the model wants; 0 but for sound.
        exact: False where the container does not tell and the counts are upper bounds.
    """

    modality: str
    height: int = 0
    width: int = 0
    frames: FramePlan | None = None
    samples: int = 0
    exact: bool = True

    @property
    def size(self) -> tuple[int, int]:
        """`(height, width)` in pixels."""
        return self.height, self.width


@dataclass(frozen=True)
class ImageItem:
    """One decoded picture. `pixels` uint8 `[height, width, 3]` RGB, EXIF orientation applied, alpha on the background."""

    pixels: Tensor

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("image", int(self.pixels.shape[0]), int(self.pixels.shape[1]))


@dataclass(frozen=True)
class VideoItem:
    """The sampled frames of one clip: uint8 `[frames, height, width, 3]` RGB, and where they come from."""

    frames: Tensor
    plan: FramePlan

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("video", int(self.frames.shape[1]), int(self.frames.shape[2]), self.plan)


@dataclass(frozen=True)
class AudioItem:
    """One sound: float32 `[samples]`, mono, about -1..1, at `rate` hertz."""

    samples: Tensor
    rate: int

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("audio", samples=int(self.samples.shape[0]))


@dataclass(frozen=True)
class VisionChunk:
    """A picture (one frame, no plan) or a timed piece of a video, one item of an ordered stream of both.

    `frames` uint8 `[frames, height, width, 3]` RGB; `plan` has one entry per frame, in seconds of the whole video.
    """

    frames: Tensor
    plan: FramePlan | None = None

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("vision_chunk", int(self.frames.shape[1]), int(self.frames.shape[2]), self.plan)


@dataclass(frozen=True)
class EmbeddingItem:
    """Rows that an encoder made elsewhere, by tensor name, checked for width, type and finiteness."""

    modality: str
    tensors: Mapping[str, Tensor]


MediaItem = ImageItem | VideoItem | AudioItem | VisionChunk


@dataclass(frozen=True)
class ItemGeometry:
    """The grid of one item, in patches *before* merging, from which tokens, rows and positions all follow.

    Example: 20 x 30 patches merged by 2 with a row after each of the 10 lines are `ItemGeometry(1, 20, 30, 2, extra=10)`.

    Args:
        t, h, w: temporal grid steps, patches high, patches wide.
        merge: patches merged to one embedding along h and along w.
        time_step: positions per temporal grid step; the product with the step index is cut to an integer.
        times: seconds of the source at each temporal grid step, for families that write them as text.
        merge_t: temporal grid steps merged to one.
        extra: encoder rows beside the grid's own (an overview, line breaks, separators).
        tiles: rows and columns of the crops that a picture is cut into; (0, 0): it is not.
        linear: its rows advance on all axes of positions together, as text does.
        folded: tokens of its range before and after its rows take the position of the token before it and of that after it.
    """

    t: int
    h: int
    w: int
    merge: int = 1
    time_step: float = 1.0
    times: tuple[float, ...] = ()
    merge_t: int = 1
    extra: int = 0
    tiles: tuple[int, int] = (0, 0)
    linear: bool = False
    folded: bool = False

    @property
    def merged(self) -> tuple[int, int, int]:
        """`(t, h, w)` of the embeddings."""
        return self.t // self.merge_t, self.h // self.merge, self.w // self.merge

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    @property
    def num_embeds(self) -> int:
        """Rows the encoder returns for this item."""
        return prod(self.merged) + self.extra


@dataclass(frozen=True)
class ItemPlan:
    """What one item will take, from its header alone.

    Args:
        modality, index: which item of the request.
        size: `(height, width)` of the source in pixels, after orientation; (0, 0) for sound.
        grid: `(t, h, w)` in patches before merging.
        num_tokens: tokens it takes in the prompt, at most this many where not `exact`.
        num_embeds: rows the encoder makes; the other tokens are text of its own.
        bytes: memory of those rows in the encoder cache.
        exact: False where the container does not tell and the counts are upper bounds.
        frames: the frames of a clip that will be used.
        shrunk_from: tokens it would have taken, where `fit` made it smaller.
    """

    modality: str
    index: int
    size: tuple[int, int]
    grid: tuple[int, int, int]
    num_tokens: int
    num_embeds: int
    bytes: int
    exact: bool = True
    frames: FramePlan | None = None
    shrunk_from: int | None = None


@dataclass(frozen=True)
class PlaceholderRange:
    """Where one item sits in the token sequence: `[offset, offset + length)`.

    `is_embed` (bool `[length]`) tells which of those tokens are encoder rows; None means all of them, and is the
    only form used for "all" (a mask that is all true is never built), so that equality and hashing agree. Two items may
    share a range where no token stands for rows of both (a clip and its sound).
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

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Tokens `[first, last)` of the sequence of each run of embeddings that lie side by side, in order."""
        if self.is_embed is None:
            return ((self.offset, self.end),) if self.length else ()
        return true_runs(self.is_embed, self.offset)

    def shares(self, other: PlaceholderRange) -> bool:
        """Whether both are the same tokens and none of them stands for rows of both."""
        same = (self.offset, self.length) == (other.offset, other.length)
        return same and not bool((self.mask() & other.mask()).any())


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


def true_runs(mask: Tensor, offset: int = 0) -> tuple[tuple[int, int], ...]:
    """`[first, last)` of each run of true values of a bool `[n]`: with F T T F T at 10, (11, 13) and (14, 15)."""
    closed = torch.nn.functional.pad(mask.to(torch.int8), (1, 1))
    first, last = ((closed.diff() == edge).nonzero().flatten() + offset for edge in (1, -1))
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def name_item(features: Sequence[MultiModalFeature], key: str) -> str:
    """The first item of this hash as its sender counts them, "image 1"; the encoder side is not among `features`."""
    index = next((i for i, feature in enumerate(features) if feature.hash == key), None)
    if index is None:
        return "the encoder side"
    modality = features[index].modality
    return f"{modality} {sum(feature.modality == modality for feature in features[:index])}"
