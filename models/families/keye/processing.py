"""Input processing of Keye-VL and Keye-VL-1.5: images and videos at native resolution; 1.5 has slow and fast frames.

Source: the publisher's processors and `keye_vl_utils`, which samples, compares and resizes the frames of videos (Kwai-Keye on
GitHub).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch.nn import functional as F

from ....callers.errors import ConfigError, InputError
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.geometry import FrameSampling, ResizePolicy, patch_grid, smart_resize
from ....mm.media.policy import DecodeSpec
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ....processors.bases.native import IMAGE_AND_VIDEO_KWARGS, NativeResolutionInfo
from ....processors.interface import Span
from ....processors.patches import PatchSpec, patchify
from ....processors.spans import Piece, build_span
from .rules import steps_of, with_sides

_PIXELS_PER_ROW = 28 * 28
_MIN_PIXELS, _MAX_PIXELS = 48 * _PIXELS_PER_ROW, 768 * _PIXELS_PER_ROW  # of a frame of Keye-VL-1.5
_FAST_RATIO = 0.3  # rows of a fast frame per row of a slow frame
_FRAMES = 2  # Keye-VL samples a multiple of this
_SIMILARITY = 0.9  # share of the squares of a fast frame that resemble those of the last slow frame, at least
_SQUARE = 28  # pixels along a side of a square that is compared
_COMPARED_PIXELS = 256 * _PIXELS_PER_ROW  # of a frame that is compared, at most
_IMAGE_KEYS = ("max_pixels", "min_pixels", "resample", "size")


class KeyeProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of Keye-VL. Videos have their own bounds, and temporal positions that follow their seconds."""

    element_format = "box_tokens"
    placeholders = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656)}
    text_config_defaults = {"vocab_size": 152064, "hidden_size": 8192}
    patch_specs = {
        "image": PatchSpec(temporal=1, upscale_short_sides=True),
        "video": PatchSpec(
            temporal=1,
            min_pixels=128 * _PIXELS_PER_ROW,
            max_pixels=_MAX_PIXELS,
            max_video_pixels=int(128000 * _PIXELS_PER_ROW * 0.9),
        ),
    }
    default_kwargs = {"images_kwargs": {"resample": "pillow"}}
    frame_sampling = FrameSampling(fps=2.0, min_frames=4, max_frames=768, spread="nearest")

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON. If videos share that of images, their size and filter are those of `keye_vl_utils`."""
        json = super().preprocessor_json(modality)
        shared = modality == "video" and not self.files.video
        return {key: value for key, value in json.items() if not (shared and key in _IMAGE_KEYS)}

    def resolve_spec(self, modality: str) -> PatchSpec:
        """Return the spec. The bound on all frames counts every second frame."""
        spec = super().resolve_spec(modality)
        most = spec.max_video_pixels
        return spec if most is None else replace(spec, max_video_pixels=_FRAMES * most)

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec(replace(super().resolve_decode_spec().sampling, multiple=_FRAMES))

    def time_step(self, fps: float) -> float:
        """Return `tokens_per_second` times the seconds between two frames."""
        return self.tokens_per_second(2) / fps


@dataclass(frozen=True)
class SlowFastSpec(PatchSpec):
    """A PatchSpec of videos. `frame_types`: for each used frame 0 (slow) or 1 (fast); empty: all frames are slow.

    `max_video_pixels` is the most pixels of all frames together; fast frames have `_FAST_RATIO` of the rows of slow ones.
    `similarity`: the frames that resemble the last slow one at least so much are fast; None: `frame_types` says which are.
    """

    frame_types: tuple[int, ...] = ()
    similarity: float | None = None

    def sides(self, size: tuple[int, int], frames: int, fast: int) -> tuple[ResizePolicy, ResizePolicy]:
        """Return the policies of slow and fast frames of `size` (height, width), of `frames` in all and `fast` fast ones."""
        factor = self.patch * self.merge
        row = factor**2
        total = self.max_video_pixels or row * self.max_pixels * frames
        least, low, high = int(self.min_pixels / row), self.min_pixels / row, self.max_pixels / row
        while low < high:  # the published search, which may exceed the total by a row per frame
            middle = int(low + high) // 2
            if ((frames - fast) * middle + fast * max(int(_FAST_RATIO * middle), least)) * row > total:
                high = middle
            else:
                low = middle + 1
        slow = ResizePolicy(factor, self.min_pixels, int(low * row))
        tall, wide = smart_resize(*size, slow)
        most = max(int(tall * wide / row * _FAST_RATIO) * row, min(self.min_pixels, _MIN_PIXELS))
        return slow, replace(slow, max_pixels=most)


class Keye15ProcessingInfo(KeyeProcessingInfo):
    """ProcessingInfo of Keye-VL-1.5. Each frame is a token, its seconds as text, and its rows; tokens surround fast frames.

    The option `frame_types` says which frames are fast. "auto" compares the decoded frames, as `keye_vl_utils` does; until then
    the number of rows is an upper bound. The `times` of a video are the seconds of its frames, then their types if known.
    """

    valid_kwargs = {
        **IMAGE_AND_VIDEO_KWARGS,
        "video": (*IMAGE_AND_VIDEO_KWARGS["video"], "frame_types", "min_frame_similarity"),
    }
    patch_specs = {
        "image": replace(KeyeProcessingInfo.patch_specs["image"], filter="bilinear"),
        "video": SlowFastSpec(
            temporal=1,
            filter="bilinear",
            min_pixels=_MIN_PIXELS,
            max_pixels=_MAX_PIXELS,
            max_video_pixels=65536 * _PIXELS_PER_ROW,
        ),
    }
    frame_sampling = FrameSampling(fps=2.0, max_frames=65536 // 48, spread="nearest")
    timestamp_position = 0.0

    def resolve_token_ids(self) -> None:
        self.frame, self.fast_start, self.fast_end = (
            self.special_token_id(text) for text in ("<|frame|>", "<|fast_start|>", "<|fast_end|>")
        )

    def resolve_spec(self, modality: str) -> PatchSpec:
        spec = NativeResolutionInfo.resolve_spec(self, modality)
        options = self.merged_kwargs[modality]
        types = options.get("frame_types")
        if "min_frame_similarity" in options and types != "auto":
            raise ConfigError('<<param>> needs frame_types="auto"', param="min_frame_similarity")
        if types is None:
            return spec
        assert isinstance(spec, SlowFastSpec)
        if types == "auto":
            return replace(spec, similarity=float(options.get("min_frame_similarity", _SIMILARITY)))
        return replace(spec, frame_types=tuple(types))

    def resolve_decode_spec(self) -> DecodeSpec:
        return NativeResolutionInfo.resolve_decode_spec(self)

    def time_step(self, fps: float) -> float:
        return 1.0

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid. If frames have yet to be compared, it is the largest that any types of frames give."""
        spec = self.specs[header.modality]
        if header.frames is None or not isinstance(spec, SlowFastSpec):
            return super().geometry(header)
        if spec.similarity is None:
            return self._grid(header, spec.frame_types)
        count = len(header.frames.indices)
        fast = max(range(count), key=lambda fast: _count_tokens(*self._steps(header, fast), count, fast))
        return self._grid(header, (0,) * (count - fast) + (1,) * fast)

    def is_exact(self, header: MediaHeader) -> bool:
        return header.exact and (header.frames is None or self.specs["video"].similarity is None)

    def for_item(self, item: MediaItem) -> Self:
        """Return a copy with the types that comparing the frames of a video gives."""
        spec = self.specs["video"]
        if not isinstance(item, VideoItem) or spec.similarity is None:
            return self
        settled = copy(self)
        settled.specs = {
            **self.specs,
            "video": replace(spec, frame_types=compare_frames(item.frames, spec.similarity), similarity=None),
        }
        return settled

    def _grid(self, header: MediaHeader, types: Sequence[int]) -> ItemGeometry:
        """Return the grid of a video with frames of these types; empty: all are slow."""
        assert header.frames is not None
        times = header.frames.timestamps
        if types and len(types) != len(times):
            reason = f"<<param>> has {len(types)} entries, but {len(times)} frames are used; give one entry per frame"
            raise InputError(reason, param="frame_types")
        slow, fast = self._steps(header, sum(types))
        sides = tuple((spec.h, spec.w) for spec in (fast if kind else slow for kind in types))
        grid = replace(slow, times=(*times, *map(float, types)))
        return with_sides(grid, sides) if sides else grid

    def _steps(self, header: MediaHeader, fast: int) -> tuple[ItemGeometry, ItemGeometry]:
        """Return the grids of a video if all its frames had the size of slow ones, or of fast ones. It has `fast` fast ones."""
        spec, frames = self.specs["video"], header.frames
        assert frames is not None
        size, count = spec.resized or header.size, len(frames.indices)
        slow, quick = (patch_grid(size, policy, spec.merge, count) for policy in spec.sides(size, count, fast))
        return slow, quick

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        times, types = geometry.times[: geometry.t], geometry.times[geometry.t :] or (0,) * geometry.t
        steps = steps_of(geometry) or [replace(geometry, t=1)] * geometry.t
        pieces: list[Piece] = []
        for seconds, fast, step in zip(times, types, steps, strict=True):
            start, end = ((self.fast_start,), (self.fast_end,)) if fast else ((), ())
            pieces += [(self.frame, *self.encode(f"{np.float32(seconds):.1f}"), *start), step.num_embeds, end]
        return build_span(pieces, self.placeholder_ids["video"])

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors of the base. A video with `frame_types` has a grid `[frames, 3]` and `num_frames`."""
        grid = self.geometry(item.header)
        steps = steps_of(grid)
        if not isinstance(item, VideoItem) or not steps:
            return super().process(item, dtype)
        frames = zip(item.frames.split(1), steps, strict=True)
        patches = torch.cat([patchify(frame, step, self.specs["video"], dtype) for frame, step in frames])
        grids = torch.tensor([(1, step.h, step.w) for step in steps])
        return {
            "pixel_values_videos": FieldElem(patches, FlatField()),
            "video_grid_thw": FieldElem(grids, FlatField(keep_on_cpu=True)),
            "num_frames": FieldElem(torch.tensor(grid.t), BatchedField(keep_on_cpu=True)),
        }, grid

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return smaller options as the base does, but None if frames that `frame_types` names would be dropped."""
        kwargs = super().shrink_kwargs(modality, grid, rows)
        dropped = kwargs is not None and "num_frames" in kwargs and modality == "video"
        return None if dropped and self.specs["video"].frame_types else kwargs


def _count_tokens(slow: ItemGeometry, fast: ItemGeometry, frames: int, count: int) -> int:
    """Return the rows of a video of which `count` frames are fast, and the tokens around these, from the grids of `_steps`."""
    return ((frames - count) * slow.num_embeds + count * fast.num_embeds) // frames + 2 * count


def compare_frames(frames: torch.Tensor, similarity: float) -> tuple[int, ...]:
    """Return the type of each frame: 1 (fast) if it resembles the last slow frame, else 0 (slow).

    Two frames are as similar as the share of their squares, in hue, saturation and value, whose cosine is above 0.7.

    Args:
        frames: uint8 `[frames, height, width, 3]` RGB.
        similarity: least similarity of a fast frame.
    """
    height, width = frames.shape[1:3]
    size = smart_resize(height, width, ResizePolicy(_SQUARE, _MIN_PIXELS, _COMPARED_PIXELS))
    types, slow = [0], _squares(frames[0], size)
    for frame in frames[1:]:
        squares = _squares(frame, size)
        types.append(int(not _similarity(slow, squares) < similarity))
        slow = slow if types[-1] else squares
    return tuple(types)


def _squares(frame: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize a frame, and return the hue, saturation and value of its squares, float32 `[squares, numbers]`."""
    import cv2

    small = F.interpolate(frame.permute(2, 0, 1)[None], size, mode="bilinear", antialias=True)[0]
    hsv = torch.from_numpy(cv2.cvtColor(small.permute(1, 2, 0).contiguous().numpy(), cv2.COLOR_RGB2HSV))
    parts = hsv.permute(2, 0, 1).unflatten(2, (-1, _SQUARE)).unflatten(1, (-1, _SQUARE))  # [3, lines, 28, columns, 28]
    squares: torch.Tensor = parts.permute(1, 3, 0, 2, 4).reshape(-1, 3 * _SQUARE**2).float()
    return squares


def _similarity(frame: torch.Tensor, other: torch.Tensor) -> float:
    """Return the share of the squares that resemble each other; black ones do not count. NaN: all are black."""
    norms = [torch.norm(part, p=2, dim=-1, keepdim=True) + 1e-8 for part in (frame, other)]
    cosines = (frame / norms[0] * (other / norms[1])).sum(-1)
    counted = ~((norms[0] < 0.01) & (norms[1] < 0.01)).flatten()
    share: float = (cosines[counted] > 0.7).float().mean().item()
    return share
