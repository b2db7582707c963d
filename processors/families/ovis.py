"""Input processing of Ovis2: the whole image, then the fewest tiles that cover it, with marks around and between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...mm.errors import ConfigError
from ...mm.fields import BatchedField, FieldElem
from ...mm.tiling import CoveringTiles, FixedSize
from ...mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ..images import read_pixel_spec
from ..interface import Span, TokenRun
from ..options import is_low_detail

_MAX_TILES = 64  # planning looks at every tile of every arrangement
_MARKS = (151666, 151667, 151668, 151669, 151670)  # tokens of start, end of the whole image, column, row, end


class Ovis2ProcessingInfo(TiledInfo):
    """ProcessingInfo of Ovis2. Marks are encoder rows, too.

    The tensors are those of TiledInfo and `tiles` int64 `[2]`: rows and columns of the tiles, (0, 0) if the image is not cut.
    """

    modalities = ("image",)
    placeholders = {"image": ("<image>",)}
    valid_kwargs = {"image": (*TILE_KWARGS, "crop_to_patches", "max_patches")}
    embeds_layout = None

    def resolve_token_ids(self) -> None:
        self.atom = self.config_token_id("image_token_id", 151665)
        self.marks = tuple(self.files.config.get("visual_indicator_token_ids") or _MARKS)

    def resolve_spec(self, modality: str) -> TileSpec:
        json = {**self.files.image, **self.merged_kwargs[modality]}
        vision = self.files.config.get("vision_config") or {}
        tile, side = height_width(json.get("size") or 384), positive_int_or(vision, "image_size", 224)
        if tile != (side, side):
            raise self.files.mismatch_error(f"image_size is {side} in vision_config of config.json", f"size {tile}")
        if not json.get("use_covering_area_grid", True):
            raise ConfigError("use_covering_area_grid=false in the preprocessor JSON is not supported")
        most = positive_int_or(json, "max_patches", 12, _MAX_TILES)
        cut = json.get("crop_to_patches") and most > 1 and not is_low_detail(json)
        tiling = CoveringTiles(side, most) if cut else FixedSize(tile)
        patch, stride = positive_int_or(vision, "patch_size", 14), positive_int_or(vision, "hidden_stride", 1)
        return read_pixel_spec(
            self.files.image, TileSpec(tiling=tiling, patch=patch, merge=stride), self.merged_kwargs[modality]
        )

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        return replace(grid, extra=grid.t + (1 if grid.t > 1 else 2))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        kwargs, grid = super().process(item, dtype)
        return {**kwargs, "tiles": FieldElem(torch.tensor(grid.tiles), BatchedField(keep_on_cpu=True))}, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the whole image and its tiles; a mark follows each. All tokens are rows."""
        (rows, columns), each = geometry.tiles, geometry.h * geometry.w // geometry.merge**2
        start, grid, column, row, end = (TokenRun((mark,), 1, True) for mark in self.marks)
        tile = TokenRun((self.atom,), each, True)
        runs = [start, tile, grid]
        for number in range(1, rows * columns + 1):
            runs += [tile, column if number % columns else row if number < rows * columns else end]
        runs += [] if rows else [end]
        return Span(geometry.num_embeds, geometry.num_embeds, lambda: runs)

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return {"max_patches": max(1, tiles - 1)}
