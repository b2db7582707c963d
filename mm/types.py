"""Data types of multimodal items: media, headers, geometry, placeholder ranges, features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ..callers.errors import hints_at_arguments
from ..callers.repr_mixin import ReprMixin
from .fields import FieldElem
from .rules import Rule

MultiModalKwargsItem = Mapping[str, FieldElem]
"""Tensors that the encoder needs for one item, by name."""


@hints_at_arguments
@dataclass(frozen=True, repr=False)
class Media(ReprMixin):
    """One input with a uuid or options of its own, accepted wherever plain data is: `Media(image, max_pixels=100_000)`.

    Args:
        data: image, video, audio or embeddings in any accepted form; None: content that is cached under `uuid`.
        uuid: the caller's name of this content.
        min_pixels, max_pixels: area of an image or frame after resizing.
        fps, num_frames: frames used of a video; only one may be given.
        detail: "low" (at most 512x512 pixels), "high" or "auto" (the model's own limits).
        resized_height, resized_width: size to start from instead of the item's own, as in qwen-vl-utils.
        min_frames, max_frames: bounds of the number of frames that `fps` gives.
        video_start, video_end: seconds of a video between which frames are used.
        total_pixels: bound of the area of all frames, divided by the frames of a temporal patch.
        frame_types: for each used frame of a video 0 (slow) or 1 (fast), or "auto": frames that resemble the last slow one are
            fast. Fast frames get fewer rows in Keye-VL-1.5.
        track: audio track of a file: its number from 0, its language, or "default".
        channel: channel of an audio: its number from 0, "left", "right", or "mix".
    """

    data: object
    uuid: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    detail: str | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    total_pixels: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    frame_types: Sequence[int] | str | None = None
    track: int | str | None = None
    channel: int | str | None = None

    @property
    def options(self) -> dict[str, object]:
        """The options that were given, by name."""
        names = [f.name for f in fields(self) if f.name not in ("data", "uuid")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, repr=False)
class FramePlan(ReprMixin):
    """The frames of a video that are used, in order of time. `indices` and `timestamps` have one entry per frame.

    Args:
        indices: frame numbers in the source, in presentation order.
        timestamps: seconds of those frames from the start of the source, from the container.
        total: frames of the source.
        fps: used frames per second of source; positions derive seconds per grid step from it.
        replaced: `(wanted, used)` frame numbers where another frame replaces a broken one.
        missing: frame numbers that could not be read and are not replaced.
    """

    indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    total: int
    fps: float
    replaced: tuple[tuple[int, int], ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class MediaHeader:
    """Size of an item, read without decoding it.

    Args:
        modality: "image", "video", "audio" or "vision_chunk".
        height, width: pixels, after EXIF orientation; 0 for audio.
        frames: the frames of a video that are used, else None.
        samples: mono samples at the model's sample rate; 0 except for audio.
        exact: False if the container does not give exact counts; they are estimates then, mostly upper bounds.
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

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded item: RGB pixels, or float32 samples."""
        frames = 1 if self.frames is None else len(self.frames.indices)
        return 3 * frames * self.height * self.width + 4 * self.samples


@dataclass(frozen=True)
class ImageItem:
    """A decoded image: uint8 `[height, width, 3]` RGB, EXIF orientation applied, transparency blended with the background."""

    pixels: Tensor

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("image", int(self.pixels.shape[0]), int(self.pixels.shape[1]))


@dataclass(frozen=True)
class VideoItem:
    """The sampled frames of a video, uint8 `[frames, height, width, 3]` RGB, and their plan."""

    frames: Tensor
    plan: FramePlan

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("video", int(self.frames.shape[1]), int(self.frames.shape[2]), self.plan)


@dataclass(frozen=True)
class AudioItem:
    """Decoded audio: float32 `[samples]`, mono, about -1..1, at `rate` hertz."""

    samples: Tensor
    rate: int

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("audio", samples=int(self.samples.shape[0]))


@dataclass(frozen=True)
class VisionChunk:
    """An image (one frame, no plan) or a timed chunk of a video: one item of an ordered stream of both.

    `frames` is uint8 `[frames, height, width, 3]` RGB; `plan` has one entry per frame, in seconds of the whole video.
    """

    frames: Tensor
    plan: FramePlan | None = None

    @property
    def header(self) -> MediaHeader:
        return MediaHeader("vision_chunk", int(self.frames.shape[1]), int(self.frames.shape[2]), self.plan)


@dataclass(frozen=True)
class EmbeddingItem:
    """Precomputed embeddings, or the tensors of an item, by name; shapes, dtype and finiteness are checked.

    `encoded`: the EncodedItem that was given, which has the rows' geometries; None for plain tensors.
    """

    modality: str
    tensors: Mapping[str, Tensor]
    encoded: EncodedItem | None = None


MediaItem = ImageItem | VideoItem | AudioItem | VisionChunk


@dataclass(frozen=True)
class ItemGeometry:
    """The grid of one item, in patches *before* merging. Its tokens, encoder rows and positions are computed from it.

    Example: 20 x 30 patches merged by 2, with a row after each of the 10 lines: `ItemGeometry(1, 20, 30, 2, extra=10)`.

    Args:
        t, h, w: temporal grid steps, patches high, patches wide.
        merge: patches merged to one embedding along h and along w.
        time_step: positions per temporal grid step; its product with the step index is truncated.
        times: seconds of the source at each temporal grid step, for models that write them as text.
        merge_t: temporal grid steps merged to one.
        extra: encoder rows besides those of the grid (thumbnail, line breaks, separators).
        tiles: rows and columns of the tiles of an image; (0, 0): not tiled.
        linear: rows advance on all position axes together, as text does.
        ahead: the last rows, which belong to tokens that are not in the prompt but generated. The answer ends with the rows.
        positions: the family's own rule of the positions of the item's tokens (`mm.positions`); None: that of the grid.
        visible: `(rows)` -> how many rows, the first ones, tokens from the item's own token on cross-attend to; tokens before
            it attend to all. None: all.
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
    ahead: int = 0
    positions: Rule | None = None
    visible: Rule | None = None

    @property
    def merged(self) -> tuple[int, int, int]:
        """`(t, h, w)` of the embeddings."""
        return self.t // self.merge_t, self.h // self.merge, self.w // self.merge

    @property
    def num_embeds(self) -> int:
        """Number of rows that the encoder returns for this item."""
        return prod(self.merged) + self.extra


@dataclass(frozen=True, eq=False)
class EncodedItem:
    """The encoder rows of one item, as `LLM.encode_media` returns them. Accepted wherever the item itself is.

    Args:
        rows: `[rows, width]` as the decoder receives them; deepstack levels follow the first `hidden` numbers of a row.
        geometries: grid, counts and timing of each piece of the item, in the order of the rows. Most items have one piece.
        hash: 256-bit hex digest of content, processing options, checkpoint and `cache_salt`.
        size: height and width of the source in pixels, (0, 0) for audio.
        frames: the frames of a video that were used.
    """

    modality: str
    rows: Tensor
    geometries: tuple[ItemGeometry, ...]
    hash: str = ""
    size: tuple[int, int] = (0, 0)
    frames: FramePlan | None = None


@dataclass(frozen=True, repr=False)
class ItemPlan(ReprMixin):
    """Tokens, encoder rows and bytes that one item will need, computed from its header.

    Args:
        modality, index: the item of the request.
        size: `(height, width)` of the source in pixels, after orientation; (0, 0) for audio.
        grid: `(t, h, w)` in patches before merging.
        num_tokens: its tokens in the prompt; an upper bound if not `exact`.
        num_embeds: encoder rows of the item; its other tokens are text.
        bytes: memory of the rows in the encoder cache.
        exact: False if the container does not give exact counts; they are estimates then, mostly upper bounds.
        frames: the frames of a video that will be used.
        shrunk_from: number of tokens before `fit` shrank the item; None: it was not shrunk.
        seconds: length of the audio, 0 for other items.
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
    seconds: float = 0.0


@dataclass(frozen=True)
class PlaceholderRange:
    """The tokens of one item in the sequence: `[offset, offset + length)`.

    `is_embed` (bool `[length]`) is True for tokens that are encoder rows. None means that all of them are; a mask of only True
    is never stored. Two items may share a range (a video and its audio): each token is a row of at most one of them.
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
        """Return the encoder rows `[first, last)` used by the tokens `[start, stop)`, counted from the start of the range.

        With the mask F T F T T, tokens [3, 5) use rows [1, 3) and tokens [0, 2) use rows [0, 1).
        """
        start, stop = max(0, start), min(self.length, stop)
        if self.is_embed is None:
            return start, max(start, stop)
        return int(self.is_embed[:start].sum()), int(self.is_embed[:stop].sum())

    def mask(self) -> Tensor:
        """Return `is_embed` as a tensor: all True if it is None."""
        return torch.ones(self.length, dtype=torch.bool) if self.is_embed is None else self.is_embed

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Tokens `[first, last)` of the sequence of each run of adjacent embeddings, in order."""
        if self.is_embed is None:
            return ((self.offset, self.end),) if self.length else ()
        return true_runs(self.is_embed, self.offset)

    def shares(self, other: PlaceholderRange) -> bool:
        """Return whether two items share this range: the same tokens, none of them a row of both."""
        same = (self.offset, self.length) == (other.offset, other.length)
        return same and not bool((self.mask() & other.mask()).any())


@dataclass(frozen=True)
class MultiModalFeature:
    """One processed item and its range in the prompt. Scheduler, caches and positions work on these.

    Args:
        hash: 256-bit hex digest of media content, processing options and `adapter`. Equal hashes mean equal encoder rows.
        adapter: identity of what the request's adapter changes in encoders and connectors, "" for nothing.
    """

    modality: str
    kwargs: MultiModalKwargsItem = field(repr=False)
    range: PlaceholderRange
    geometry: ItemGeometry
    hash: str
    adapter: str = ""

    @property
    def stream(self) -> int | None:
        """Number of the live stream of which the item is a chunk, or of its open window; None for other items."""
        chunk = self.kwargs.get("audio_stream")
        return int(chunk.data[0]) if chunk is not None and isinstance(chunk.data, Tensor) else None


def true_runs(mask: Tensor, offset: int = 0) -> tuple[tuple[int, int], ...]:
    """Return `[first, last)` of each run of True in a bool `[n]`: F T T F T at offset 10 gives (11, 13) and (14, 15)."""
    closed = torch.nn.functional.pad(mask.to(torch.int8), (1, 1))
    first, last = ((closed.diff() == edge).nonzero().flatten() + offset for edge in (1, -1))
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def find_item(features: Sequence[MultiModalFeature], key: str) -> tuple[str, int]:
    """Return the modality of the first item with this hash, and its index among the items of that modality."""
    index = next(i for i, feature in enumerate(features) if feature.hash == key)
    return item_index(features, index)


def item_index(features: Sequence[MultiModalFeature], index: int) -> tuple[str, int]:
    """Return the modality of `features[place]` and how many items before it have the same one."""
    modality = features[index].modality
    return modality, sum(feature.modality == modality for feature in features[:index])
