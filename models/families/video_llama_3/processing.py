"""Input processing of VideoLLaMA3: native resolution, and rows of frames that are left out because they did not change.

Source: transformers' processors. Frames are sampled as the publisher does: one per second, up to 180.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from ....callers.errors import ConfigError, InputError
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.geometry import FrameSampling, ResizePolicy
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ....processors.bases.native import IMAGE_AND_VIDEO_KWARGS, NativeResolutionInfo
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from ....processors.interface import Span
from ....processors.patches import PatchSpec, patchify
from ....processors.spans import Piece, build_span
from .config import MAX_RATIO, MERGES

_CHANGE = 0.1  # least mean change of a square's normalised numbers, times 255
_ROW = 28 * 28  # pixels of a row of a frame
_OPTION = "use_token_compression"
_HALVES = IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD


@dataclass(frozen=True)
class FramesSpec(PatchSpec):
    """A PatchSpec of videos, whose frames share `max_pixels`; each has at least `min_pixels` unless that is more.

    `compress`: rows that did not change since the frame before are left out.
    """

    compress: bool = True

    def policy(self, frames: int = 1) -> ResizePolicy:
        return ResizePolicy(self.patch * self.merge, self.min_pixels, max(1, self.max_pixels // frames))


class VideoLlama3ProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of VideoLLaMA3. The `times` of a video are the seconds of its frames, then the rows that each keeps.

    `kept`: for each frame and row of a decoded video, whether it is kept, and the patches that tell; see `for_item`.
    """

    placeholders = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656)}
    text_config_defaults = {"vocab_size": 151936, "hidden_size": 4096}
    valid_kwargs = {**IMAGE_AND_VIDEO_KWARGS, "video": (*IMAGE_AND_VIDEO_KWARGS["video"], _OPTION)}
    option_values = {_OPTION: (True, False)}
    patch_specs = {
        "image": PatchSpec(*_HALVES, merge=MERGES["image"], temporal=1),
        "video": FramesSpec(
            *_HALVES,
            merge=MERGES["video"],
            temporal=1,
            min_pixels=128 * _ROW,
            max_pixels=768 * _ROW,
            bounds_all_frames=True,
        ),
    }
    frame_sampling = FrameSampling(fps=1.0, min_frames=4, max_frames=180)
    timestamp_position = 0.0
    kept: tuple[Tensor, Tensor] | None = None

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        return self.files.video if modality == "video" else self.files.image

    def resolve_spec(self, modality: str) -> PatchSpec:
        spec = super().resolve_spec(modality)
        if (spec.merge, spec.temporal) != (MERGES[modality], 1):
            expected = f"merge_size {MERGES[modality]} and temporal_patch_size 1"
            raise ConfigError(f"{modality}s of this model have {expected}, not {spec.merge} and {spec.temporal}")
        if not isinstance(spec, FramesSpec):
            return spec
        options = {_OPTION: True, **self.preprocessor_json(modality), **self.merged_kwargs[modality]}
        return replace(spec, compress=bool(options[_OPTION]))

    def is_exact(self, header: MediaHeader) -> bool:
        still = header.frames is None or len(header.frames.indices) == 1 or not self.specs["video"].compress
        return header.exact and (still or self.kept is not None)

    def for_item(self, item: MediaItem) -> Self:
        """Return a copy that knows which rows of a video are kept.

        Raises:
            InputError: they are so few that the memory plan does not hold.
        """
        spec = self.specs["video"]
        if not isinstance(item, VideoItem) or not spec.compress:
            return self
        grid = super().geometry(item.header)
        patches = _row_by_row(item.frames, grid, spec)
        mask = changed_squares(patches, grid)
        most = MAX_RATIO * int(mask.sum())
        if mask.numel() > most:
            reason = f"its frames hardly change: {mask.numel() * MAX_RATIO // most} rows per row that compression leaves"
            advice = f"the limit is {MAX_RATIO}; use fewer frames (fps, num_frames) or {_OPTION}=False"
            raise InputError(f"{reason}, {advice}", code="over_limit", limit=MAX_RATIO)
        settled = copy(self)
        settled.kept = mask, patches
        return settled

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid. Without `for_item`, that of a video has all rows."""
        grid = super().geometry(header)
        if header.frames is None or self.kept is None:
            return grid
        counts = self.kept[0].sum(1).tolist()
        return replace(grid, times=(*grid.times, *map(float, counts)), extra=sum(counts) - prod(grid.merged))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows; for a video, those of each frame after its time."""
        if modality != "video":
            return super().span(modality, geometry)
        times, counts = geometry.times[: geometry.t], geometry.times[geometry.t :]
        rows = [int(count) for count in counts] or [prod(geometry.merged) // geometry.t] * geometry.t
        pieces = list[Piece]()
        for number, (seconds, count) in enumerate(zip(times, rows, strict=True)):
            pieces += [self.encode(f"{',' * (number > 0)}Time {seconds:.1f}s:"), count]
        return build_span(pieces, self.placeholder_ids["video"])

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors of the base, row by row of patches.

        A video has `kept_rows` int64 `[rows]`, numbers of the rows that are kept, and `num_kept`, how many there are.
        """
        if not isinstance(item, VideoItem):
            return super().process(item, dtype)
        grid, spec = self.geometry(item.header), self.specs["video"]
        mask, patches = self.kept or (None, _row_by_row(item.frames, grid, spec))
        rows = torch.arange(prod(grid.merged)) if mask is None else mask.flatten().nonzero().flatten()
        return {
            "pixel_values_videos": FieldElem(patches.to(dtype), FlatField()),
            "video_grid_thw": FieldElem(torch.tensor([grid.t, grid.h, grid.w]), BatchedField(keep_on_cpu=True)),
            "kept_rows": FieldElem(rows, FlatField()),
            "num_kept": FieldElem(torch.tensor(len(rows)), BatchedField(keep_on_cpu=True)),
        }, grid


def _row_by_row(frames: Tensor, grid: ItemGeometry, spec: PatchSpec) -> Tensor:
    """Return float32 `[patches, 3 * patch^2]` of a video, row by row."""
    return patchify(frames, grid, replace(spec, merge=1))


def changed_squares(patches: Tensor, grid: ItemGeometry) -> Tensor:
    """Return bool `[frames, squares]`: the squares that differ from those of the frame before, at least one in each frame.

    All squares of the first frame count as changed. If no square of a frame differs, its first one is kept.

    Args:
        patches: float32 `[patches, numbers]`, row by row, normalised.
    """
    side = grid.merge
    frames = patches.view(grid.t, grid.h // side, side, grid.w // side, side, -1)
    mask = torch.ones(grid.t, frames.shape[1] * frames.shape[3], dtype=torch.bool)
    for number in range(1, grid.t):
        change = (frames[number] - frames[number - 1]).abs().mean((1, 3, 4)) * 255
        mask[number] = change.flatten() > _CHANGE
        mask[number, 0] |= not mask[number].any()
    return mask
