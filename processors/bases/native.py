"""Base of families that take images and videos at their native resolution, as flat patches with their grids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...callers.errors import ConfigError, InputError
from ...mm.fields import BatchedField, FieldElem, FlatField
from ...mm.geometry import FrameSampling, patch_grid
from ...mm.media.policy import DecodeSpec
from ...mm.tiling.sizes import whole_multiples
from ...mm.types import (
    EmbeddingItem,
    ImageItem,
    ItemGeometry,
    ItemPlan,
    MediaHeader,
    MediaItem,
    MultiModalKwargsItem,
    VideoItem,
)
from ..options import TIME_KWARGS, check_keeps_size
from ..patches import PatchSpec, apply_size, patchify, read_patch_spec
from .base import BaseProcessingInfo

IMAGE_KWARGS = ("detail", "max_pixels", "min_pixels", "resample", "resized_height", "resized_width", "size")
_SIZE_KWARGS = (*(name for name in IMAGE_KWARGS if name != "resample"), "total_pixels")
_FRAME_KWARGS = (*TIME_KWARGS, "fps", "max_frames", "min_frames", "num_frames", "total_pixels")
IMAGE_AND_VIDEO_KWARGS = {"image": IMAGE_KWARGS, "video": (*IMAGE_KWARGS, *_FRAME_KWARGS)}
DEFAULT_VIDEO_FPS = 24.0  # frame rate of frames that come without one


class NativeResolutionInfo(BaseProcessingInfo):
    """Base of the families: sides are rounded to merged patches within area bounds, and `temporal` frames make one patch.

    `patch_specs`: the published processor's defaults, by modality. If a patch has one frame, `temporal_patch_size`
    of the vision config is not compared. `frame_sampling`: sampling of video files, where the
    preprocessor's JSON does not set it. `timestamp_position`: for families that write timestamps as text, the place of a step's
    timestamp between its first frame (0) and its last frame (1). `deepstack_layers`: default of `deepstack_visual_indexes`.
    `can_keep_sizes`: do_resize may be false.
    """

    modalities: tuple[str, ...] = ("image", "video")
    valid_kwargs = IMAGE_AND_VIDEO_KWARGS
    embeds_layout: str | None = "grid"
    patch_specs: ClassVar[Mapping[str, PatchSpec]]
    frame_sampling: ClassVar[FrameSampling] = FrameSampling(fps=2.0, min_frames=4, max_frames=768)
    timestamp_position: ClassVar[float | None] = None
    deepstack_layers: ClassVar[tuple[int, ...]] = ()
    can_keep_sizes: ClassVar[bool] = False

    def resolve_spec(self, modality: str) -> PatchSpec:
        default = replace(self.patch_specs[modality], can_keep_size=self.can_keep_sizes)
        spec = read_patch_spec(self.preprocessor_json(modality), default)
        for kwargs in self.processor_kwargs[modality]:
            spec = apply_size(spec, kwargs)
            if spec.keeps_size:
                check_keeps_size(kwargs, _SIZE_KWARGS)
        frames = {"temporal_patch_size": spec.temporal} if self.patch_specs[modality].temporal > 1 else {}
        self.check_config("vision_config", patch_size=spec.patch, spatial_merge_size=spec.merge, **frames)
        return spec

    def resolve_decode_spec(self) -> DecodeSpec:
        if "video" not in self.modalities:
            return DecodeSpec()
        json = self.preprocessor_json("video")
        bounds = {key: json[key] for key in ("min_frames", "max_frames") if json.get(key)}
        sampling = replace(self.frame_sampling, multiple=self.specs["video"].temporal, **bounds)
        return DecodeSpec(self.sampling_policy("video", sampling, json))

    @property
    def embed_width(self) -> int:
        """Width of an encoder row: one hidden size for the decoder's input, and one per DeepStack layer."""
        vision = self.files.config.get("vision_config") or {}
        return super().embed_width * (1 + len(vision.get("deepstack_visual_indexes", self.deepstack_layers)))

    def time_step(self, fps: float) -> float:
        """Return the positions per temporal grid step of a video sampled at `fps` frames per second."""
        return 1.0

    def tokens_per_second(self, default: float) -> float:
        """Return `tokens_per_second` of the vision config; ConfigError unless it is a number above 0."""
        value = (self.files.config.get("vision_config") or {}).get("tokens_per_second", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"tokens_per_second in vision_config is {repr(value)[:60]}; it must be a number above 0")
        return float(value)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid, from the header alone; InputError for an extreme aspect ratio."""
        spec = self.specs[header.modality]
        size = spec.resized or header.size
        side = spec.patch * spec.merge
        if spec.keeps_size and (size[0] % side or size[1] % side):
            sides = f"multiples of {side} pixels, not {size[1]}x{size[0]}"
            raise InputError(
                f"this model does not resize images (do_resize=false); give sides that are {sides}", code="unsupported"
            )
        if header.frames is None:
            return patch_grid(size, spec.policy(), spec.merge)
        frames, step = len(header.frames.indices), self.time_step(header.frames.fps or DEFAULT_VIDEO_FPS)
        grid = patch_grid(size, spec.policy(frames), spec.merge, frames, spec.temporal, step)
        return replace(grid, times=self._times(header.frames.timestamps, spec.temporal))

    def kept_size(self, modality: str, size: tuple[int, int]) -> tuple[int, int]:
        spec = self.specs[modality]
        return whole_multiples(size, spec.patch * spec.merge) if spec.keeps_size else size

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Return the grid. Timestamps of a video assume the default frame rate."""
        grid = super().embeds_geometry(item)
        if item.modality != "video":
            return grid
        fps, temporal = self.decode_spec.sampling.fps or DEFAULT_VIDEO_FPS, self.specs["video"].temporal
        seconds = [frame / fps for frame in range(grid.t * temporal)]
        return replace(grid, time_step=self.time_step(fps), times=self._times(seconds, temporal))

    def _times(self, seconds: Sequence[float], temporal: int) -> tuple[float, ...]:
        """Return the timestamp of each temporal step, from those of its frames."""
        position = self.timestamp_position
        if position is None:
            return ()
        padded = [*seconds, *[seconds[-1]] * (-len(seconds) % temporal)]
        ends = zip(padded[::temporal], padded[temporal - 1 :: temporal], strict=True)
        return tuple(first * (1 - position) + last * position for first, last in ends)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `pixel_values` `[patches, 3 * temporal * patch^2]` and `image_grid_thw` `[3]`, or for videos
        `pixel_values_videos` and `video_grid_thw`.
        """
        if isinstance(item, ImageItem):
            modality, frames, names = "image", item.pixels[None], ("pixel_values", "image_grid_thw")
        elif isinstance(item, VideoItem):
            modality, frames, names = "video", item.frames, ("pixel_values_videos", "video_grid_thw")
        else:
            raise TypeError(f"a {type(item).__name__} is neither an image nor a video")
        grid = self.geometry(item.header)
        patches = FieldElem(patchify(frames, grid, self.specs[modality], dtype), FlatField())
        shape = FieldElem(torch.tensor([grid.t, grid.h, grid.w]), BatchedField(keep_on_cpu=True))
        return {names[0]: patches, names[1]: shape}, grid

    def resized(self, plan: ItemPlan) -> tuple[int, int]:
        patch = self.specs[plan.modality].patch
        return plan.grid[1] * patch, plan.grid[2] * patch

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer pixels per frame and, if less than 16 rows per temporal step would be left, fewer frames.

        Frames that keep their size are only left out.
        """
        spec, steps = self.specs[modality], max(1, min(grid[0], rows // 16))
        if spec.keeps_size:
            steps = rows * spec.merge**2 // (grid[1] * grid[2])
            return {"num_frames": steps * spec.temporal} if modality == "video" and 0 < steps < grid[0] else None
        area = max(1, rows // steps) * (spec.patch * spec.merge) ** 2 * (steps * spec.temporal if spec.bounds_all_frames else 1)
        frames = {"num_frames": steps * spec.temporal} if steps < grid[0] else {}
        return {"min_pixels": 1, "max_pixels": area, **frames}
