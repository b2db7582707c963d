"""Families that take pictures and clips at their own size, as flat patches with their grids. Knows no family and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.geometry import SamplingPolicy, patch_grid
from ..mm.media.policy import DecodeSpec
from ..mm.types import EmbeddingItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from .base import FamilyInfo
from .options import with_sampling
from .patches import PatchSpec, patchify, read_spec, with_size

PIXELS = ("detail", "max_pixels", "min_pixels", "resample", "size")
OPTIONS = {"image": PIXELS, "video": (*PIXELS, "fps", "max_duration", "num_frames")}
UNKNOWN_FPS = 24.0  # of bare frames


class NativeInfo(FamilyInfo):
    """Sides are rounded to merged patches, the area is kept within bounds; `temporal` frames make one patch.

    `patches`: the published processor's own defaults, by modality. `frames`: which frames of a file are used where the
    preprocessor's JSON does not say. `timed`: where in a step of a clip the time lies that is written as text beside it, 0 at
    its first frame and 1 at its last; None: none is written. The tensors are `pixel_values` and `image_grid_thw`,
    `pixel_values_videos` and `video_grid_thw`.
    """

    modalities: tuple[str, ...] = ("image", "video")
    known = OPTIONS
    rows = "grid"
    patches: ClassVar[Mapping[str, PatchSpec]]
    frames: ClassVar[SamplingPolicy] = SamplingPolicy(fps=2.0, min_frames=4, max_frames=768)
    timed: ClassVar[float | None] = None

    def read(self, modality: str) -> PatchSpec:
        spec = read_spec(self.json(modality), self.patches[modality])
        for layer in self.layers[modality]:
            spec = with_size(spec, layer)
        self.agree("vision_config", patch_size=spec.patch, spatial_merge_size=spec.merge, temporal_patch_size=spec.temporal)
        return spec

    def json(self, modality: str) -> Mapping[str, Any]:
        """The preprocessor's; checkpoints older than the clips' file use one for both."""
        return (self.files.video or self.files.image) if modality == "video" else self.files.image

    def decoding(self) -> DecodeSpec:
        if "video" not in self.modalities:
            return DecodeSpec()
        json = self.json("video")
        bounds = {key: json[key] for key in ("min_frames", "max_frames") if json.get(key)}
        own = replace(self.frames, multiple=self.specs["video"].temporal, **bounds)
        return DecodeSpec(self.sampling("video", with_sampling(own, {key: json.get(key) for key in ("fps", "num_frames")})))

    def time_step(self, fps: float) -> float:
        """Positions per temporal grid step of a clip of which `fps` frames per second are used."""
        return 1.0

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Grid from the header alone; InputError for sides that differ by too much."""
        spec = self.specs[header.modality]
        if header.frames is None:
            return patch_grid(header.size, spec.policy(), spec.merge)
        frames, step = len(header.frames.indices), self.time_step(header.frames.fps or UNKNOWN_FPS)
        grid = patch_grid(header.size, spec.policy(frames), spec.merge, frames, spec.temporal, step)
        return replace(grid, times=self._times(header.frames.timestamps, spec.temporal))

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Frames of a clip of rows lie as far apart as frames are usually used."""
        grid = super().rows_geometry(item)
        if item.modality != "video":
            return grid
        fps, temporal = self.decode_spec.sampling.fps or UNKNOWN_FPS, self.specs["video"].temporal
        seconds = [frame / fps for frame in range(grid.t * temporal)]
        return replace(grid, time_step=self.time_step(fps), times=self._times(seconds, temporal))

    def _times(self, seconds: Sequence[float], temporal: int) -> tuple[float, ...]:
        """Of each step, from those of its frames."""
        if self.timed is None:
            return ()
        filled = [*seconds, *[seconds[-1]] * (-len(seconds) % temporal)]
        ends = zip(filled[::temporal], filled[temporal - 1 :: temporal], strict=True)
        return tuple(first * (1 - self.timed) + last * self.timed for first, last in ends)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`pixel_values` `[patches, 3 * temporal * patch^2]` and its grid, `_videos` for clips."""
        if isinstance(item, ImageItem):
            modality, frames, names = "image", item.pixels[None], ("pixel_values", "image_grid_thw")
        elif isinstance(item, VideoItem):
            modality, frames, names = "video", item.frames, ("pixel_values_videos", "video_grid_thw")
        else:
            raise TypeError(f"a {type(item).__name__} is neither picture nor clip")
        grid = self.geometry(item.header)
        patches = FieldElem(patchify(frames, grid, self.specs[modality], dtype), FlatField())
        shape = FieldElem(torch.tensor([grid.t, grid.h, grid.w]), BatchedField(keep_on_cpu=True))
        return {names[0]: patches, names[1]: shape}, grid

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Fewer pixels a frame and, where less than 16 rows a temporal patch would be left, fewer frames."""
        spec, steps = self.specs[modality], max(1, min(grid[0], rows // 16))
        area = max(1, rows // steps) * (spec.patch * spec.merge) ** 2 * (steps * spec.temporal if spec.together else 1)
        frames = {"num_frames": steps * spec.temporal} if steps < grid[0] else {}
        return {"min_pixels": 1, "max_pixels": area, **frames}
