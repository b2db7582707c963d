"""Input processing of openPangu-VL: native resolution; every frame of a video is a grid of its own, between marks.

Source: the publisher's processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....mm.geometry import ResizePolicy
from ....mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.native import NativeResolutionInfo
from ....processors.images import resize
from ....processors.interface import Span
from ....processors.patches import PatchSpec
from ....processors.spans import Piece, build_span

_SHORT, _ENLARGED = 28, 56  # an image with a side up to the first is enlarged until its shorter side is the second
_VIDEO_PIXELS = 448 * 448 * 32
_FRAME_KEYS = {"min_pixels": "any_res_min_frame_pixels", "max_pixels": "any_res_max_frame_pixels"}


@dataclass(frozen=True)
class FrameSpec(PatchSpec):
    """The area of a frame is that of a whole video divided by the number of its frames, within the bounds of one frame.

    `least_video_pixels`, `max_video_pixels`: bounds of the area of all frames; None: there are none.
    """

    least_video_pixels: int | None = None

    def policy(self, frames: int = 1) -> ResizePolicy:
        most = None if self.max_video_pixels is None else self._share(self.max_video_pixels, frames)
        least = None if self.least_video_pixels is None else self._share(self.least_video_pixels, frames)
        most = most or self.max_pixels
        return ResizePolicy(self.patch * self.merge, min(least or self.min_pixels, most), most)

    def _share(self, area: int, frames: int) -> int:
        return max(min(area // frames, self.max_pixels), self.min_pixels)


class OpenPanguVLProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of openPangu-VL. A patch covers one frame; the model repeats it to the depth of its weights."""

    placeholders = {"image": ("image_token_id", "[unused19]"), "video": ("video_token_id", "[unused32]")}
    patch_specs = {
        "image": PatchSpec(temporal=1),
        "video": FrameSpec(temporal=1, max_video_pixels=_VIDEO_PIXELS, least_video_pixels=_VIDEO_PIXELS),
    }

    def resolve_token_ids(self) -> None:
        self.start = self.config_token_id("vision_start_token_id", "[unused18]")
        self.end = self.config_token_id("vision_end_token_id", "[unused20]")

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON of a modality. That of videos has bounds of its own, and a size that the publisher does not use."""
        json = {**super().preprocessor_json(modality), "temporal_patch_size": 1}
        if modality == "image":
            return json
        kept = {key: value for key, value in json.items() if key not in ("size", *_FRAME_KEYS)}
        return kept | {key: json[name] for key, name in _FRAME_KEYS.items() if json.get(name)}

    def resolve_spec(self, modality: str) -> PatchSpec:
        spec = super().resolve_spec(modality)
        if not isinstance(spec, FrameSpec):
            return spec
        json, asked = self.preprocessor_json("video"), self.merged_kwargs["video"].get("total_pixels")
        if not json.get("any_res_dynamic_video_pixels", True):
            return replace(spec, max_video_pixels=asked, least_video_pixels=None)
        most = asked or json.get("any_res_max_video_total_pixels", _VIDEO_PIXELS)
        least = min(json.get("any_res_min_video_total_pixels", _VIDEO_PIXELS), most)
        return replace(spec, max_video_pixels=most, least_video_pixels=least)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        if header.modality == "image":
            height, width = _enlarged(*header.size)
            header = replace(header, height=height, width=width)
        return super().geometry(header)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        if isinstance(item, ImageItem):
            self.geometry(item.header)  # refuses slivers before they are enlarged
            planes = item.pixels.permute(2, 0, 1)[None]
            enlarged = resize(planes, _enlarged(*item.header.size), replace(self.specs["image"], resample="pillow"))
            item = ImageItem(enlarged[0].permute(1, 2, 0).contiguous())
        return super().process(item, dtype)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        rows = geometry.num_embeds // geometry.t
        pieces: list[Piece] = [rows]
        for _ in range(geometry.t - 1):
            pieces += [(self.end, self.start), rows]
        return build_span(pieces, self.placeholder_ids[modality])

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for a smaller area; of videos, for that of all frames."""
        if modality == "image":
            return super().shrink_kwargs(modality, grid, rows)
        spec = self.specs["video"]
        steps = max(1, min(grid[0], rows // 16))
        area = max(1, rows // steps) * (spec.patch * spec.merge) ** 2
        frames = {"num_frames": steps} if steps < grid[0] else {}
        return {"min_pixels": 1, "max_pixels": area, "total_pixels": area * steps, **frames}


def _enlarged(height: int, width: int) -> tuple[int, int]:
    """Return the size of an image before it is resized. Both sides are scaled alike, and the longer one is rounded down."""
    if min(height, width) > _SHORT or min(height, width) < 1:
        return height, width
    ratio = _ENLARGED * 1.0 / min(height, width)
    return (_ENLARGED, int(ratio * width)) if width >= height else (int(ratio * height), _ENLARGED)
