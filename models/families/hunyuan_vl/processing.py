"""Input processing of HunYuan-VL and HunYuan-OCR: pages at native resolution, as flat patches of one frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from ....mm.rules import Rule
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.native import IMAGE_KWARGS, NativeResolutionInfo
from ....processors.patches import PatchSpec
from .rules import lines_on_a_page


class HunYuanVLProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of HunYuan-VL: a row before and after each image, and one at the end of each line."""

    adds_special_tokens = False
    element_format = "pairs_in_text"
    ocr_prompts = ("hunyuan-spotting",)
    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    placeholders = {"image": ("image_token_id", 120120)}
    patch_specs = {"image": PatchSpec(patch=16, temporal=1, min_pixels=512 * 512, max_pixels=2048 * 2048)}
    embeds_layout = None

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON without the filter, which the published processor does not read."""
        return {key: value for key, value in super().preprocessor_json(modality).items() if key != "resample"}

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        return replace(grid, extra=grid.merged[1] + 2, positions=Rule.of(lines_on_a_page))

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for as many squares as fit beside one row per line and two rows around the image."""
        ratio = grid[1] / grid[2]
        squares = ((sqrt(ratio + 4 * max(1, rows - 2)) - sqrt(ratio)) / 2) ** 2
        return super().shrink_kwargs(modality, grid, max(1, int(squares)))
