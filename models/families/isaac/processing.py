"""Input processing of Isaac: images at native size, within bounds on the number of patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError
from ....mm.rules import Rule
from ....mm.tiling.whole import BoundedPatches
from ....mm.types import EmbeddingItem, ItemGeometry, MediaHeader
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.bases.tiles import TiledInfo, TileSpec, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from ....processors.options import is_low_detail
from ....processors.patches import LOW_DETAIL
from .rules import grid_from_zero


class IsaacProcessingInfo(TextPlaceholders, TiledInfo):
    """ProcessingInfo of Isaac. The values are in config.json. Images are resized without a low-pass filter, as published."""

    element_format = "pointing_tags"
    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "<|image_pad|>")}
    valid_kwargs = {"image": ("detail", "max_num_patches", "min_num_patches")}
    embeds_layout = "grid"

    @property
    def placeholder_texts(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"image": self.files.config.get("vision_token") or "<image>"}

    def resolve_spec(self, modality: str) -> TileSpec:
        config, options = self.files.config, self.merged_kwargs[modality]
        vision = config.get("vision_config") or {}
        patch = positive_int_or(config, "video_patch_size", positive_int_or(vision, "patch_size", 16))
        merge = positive_int_or(config, "pixel_shuffle_scale", positive_int_or(vision, "pixel_shuffle_scale_factor", 1))
        self.check_config("vision_config", patch_size=patch, pixel_shuffle_scale_factor=merge)
        most = positive_int_or(config, "vision_max_num_patches", 256)
        if is_low_detail(options):
            most = min(most, LOW_DETAIL // patch**2)
        least = min(positive_int_or(config, "vision_min_num_patches", 1), options.get("max_num_patches") or most)
        least = positive_int_or(options, "min_num_patches", least)
        most = positive_int_or(options, "max_num_patches", max(most, least))
        if least > most:
            raise ConfigError(f"min_num_patches is {least} and max_num_patches is {most}; the first must not be larger")
        return TileSpec(
            IMAGENET_STANDARD_MEAN,
            IMAGENET_STANDARD_STD,
            filter="bilinear",
            antialias=False,
            filters_uint8=True,
            tiling=BoundedPatches(patch, patch * merge, least, most),
            patch=patch,
            merge=merge,
        )

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), positions=Rule.of(grid_from_zero))

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return replace(super().embeds_geometry(item), positions=Rule.of(grid_from_zero))

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return {"min_num_patches": 1, "max_num_patches": rows * self.specs[modality].merge ** 2} if rows else None
