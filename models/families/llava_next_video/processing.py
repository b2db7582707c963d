"""Input processing of LLaVA-NeXT-Video: images as in LLaVA-NeXT, videos as the centre squares of frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError
from ....mm.geometry import FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.tiling.canvas import AnyResTiles
from ....mm.tiling.whole import CenterCrop, FixedSize, PaddedSquare
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, height_width
from ....processors.options import TIME_KWARGS
from ..llava.processing import DEFAULT_FRAMES, LlavaNextProcessingInfo, LlavaSpec

STRIDE = 2  # patches of a frame that become one row, along each side


class LlavaNextVideoProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of LLaVA-NeXT-Video."""

    modalities = ("image", "video")
    placeholders = {
        "image": ("image_token_id", "image_token_index", 32001),
        "video": ("video_token_id", "video_token_index", 32000),
    }
    valid_kwargs = {"image": TILE_KWARGS, "video": (*TIME_KWARGS, "fps", "num_frames", "resample")}

    def resolve_spec(self, modality: str) -> LlavaSpec:
        stride = self.files.config.get("spatial_pool_stride", STRIDE)
        if stride != STRIDE:
            raise ConfigError(
                f"spatial_pool_stride in config.json is {stride!r}; the published processor counts rows for {STRIDE}"
            )
        spec = super().resolve_spec(modality)
        if spec.side % STRIDE:
            raise ConfigError(
                f"a frame of {spec.side} x {spec.side} patches cannot be pooled in squares of {STRIDE} x {STRIDE}"
            )
        return spec

    def _tiling(self, modality: str) -> FixedSize | PaddedSquare | AnyResTiles | CenterCrop:  # type: ignore[override]
        if modality == "image":
            return super()._tiling(modality)
        json, side = self.preprocessor_json("video"), self.vision_defaults["image_size"]
        return CenterCrop(height_width(json.get("size") or side)[0], height_width(json.get("crop_size") or side))

    def resolve_decode_spec(self) -> DecodeSpec:
        policy = self.sampling_policy("video", FrameSampling(), {})
        is_set = policy.fps is not None or policy.num_frames is not None
        return DecodeSpec(policy if is_set else replace(policy, num_frames=DEFAULT_FRAMES))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        if header.modality == "image":
            return super().geometry(header)
        grid = TiledInfo.geometry(self, header)
        return replace(grid, extra=grid.t * self.rows_per_frame - grid.num_embeds)

    @property
    def rows_per_frame(self) -> int:
        """Rows of a frame after pooling."""
        rows: int = (self.specs["video"].side // STRIDE) ** 2
        return rows

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        if modality == "image":
            return super().shrink_kwargs(modality, grid, rows)
        frames = rows // self.rows_per_frame
        return {"num_frames": frames} if frames > 0 and grid[0] > 1 else None
