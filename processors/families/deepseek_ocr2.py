"""What DeepSeek-OCR wants to be fed: tiles by best aspect ratio, then the whole on a square, and one row. Knows no model.

Sources: arXiv 2510.18234 (the first one), 2601.20552 (the second).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..mm.errors import ConfigError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.tiling import AspectTiles, CropPlan, SquareAndTiles
from ..mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .base import FamilyInfo
from .pictures import HALF, PixelSpec, patch_rows, read_pixels, with_resample
from .tiles import DETAIL, MOST_PIECES, is_low, number_of, pair

MERGE = 4  # patches along a side of a row
GREY = (127, 127, 127)
_WHOLE = SquareAndTiles(1024, GREY, None)


@dataclass(frozen=True)
class Strategy:
    """Rows along a side of the whole and of a tile, tiles at most, and whether a learned row ends each line of rows."""

    whole: int = 16
    tile: int = 12
    most: int = 6
    newlines: bool = False


V1, V2 = Strategy(tile=10, most=9, newlines=True), Strategy()


@dataclass(frozen=True)
class SquareSpec(PixelSpec):
    """How pictures are cut, and each piece into patches of `patch` pixels a side."""

    tiling: SquareAndTiles = _WHOLE
    patch: int = 16

    @property
    def side(self) -> int:
        """Patches of the whole, along a side."""
        return self.tiling.square // self.patch


def _published(vision: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the publisher's own vision_config; empty in another layout."""
    width = vision.get("width")
    part = width.get(name) if isinstance(width, Mapping) else None
    return part if isinstance(part, Mapping) else {}


class DeepseekOcr2ProcessingInfo(FamilyInfo):
    """ProcessingInfo of DeepSeek-OCR 2, and with another strategy of the first one.

    The tensors are `pixel_values_local` and `pixel_values` `[patches, 3 * patch^2]` of the tiles and of the whole, row by
    row, and `tiles` int64 `[4]`: rows and columns of tiles, patches along a side of each, and of the whole.
    """

    strategy: ClassVar[Strategy] = V2
    modalities = ("image",)
    slots = {"image": ("image_token_id", 128815)}
    known = {"image": (*DETAIL, "crop_to_patches", "max_patches", "min_patches")}

    def read(self, modality: str) -> SquareSpec:
        json, vision = self.files.image, self.files.config.get("vision_config") or {}
        sam = vision.get("sam_config") or _published(vision, "sam_vit_b")
        patch = pair(sam.get("patch_size", 16), "patch_size")[0]
        options = {"crop_to_patches": True, **json}
        for layer in self.layers[modality]:
            options |= layer
        whole = self._square(json, "size", self.strategy.whole * MERGE * patch)
        tile = self._square(json, "tile_size", self.strategy.tile * MERGE * patch)
        fill = tuple(json.get("background_color", GREY))
        least, most = number_of(options, "min_patches", 2), number_of(options, "max_patches", self.strategy.most, MOST_PIECES)
        tiles = AspectTiles((tile, tile), least, most)
        cut = options["crop_to_patches"] and not is_low(options)
        tiling = SquareAndTiles(whole, fill, tiles) if cut else SquareAndTiles(tile, fill, None)
        spec = read_pixels(json, SquareSpec(HALF, HALF, tiling=tiling, patch=patch))
        for layer in self.layers[modality]:
            spec = with_resample(spec, layer)
        return spec

    def _square(self, json: Mapping[str, Any], name: str, must: int) -> int:
        tall, wide = pair(json.get(name) or must, name)
        if (tall, wide) != (must, must):
            raise ConfigError(f"{name} in the preprocessor JSON is {tall}x{wide}, this model is made for {must}x{must}")
        return must

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        spec: SquareSpec = self.specs["image"]
        rows, columns = spec.tiling.plan(*header.size).tiles
        tile, end = self.strategy.tile, int(self.strategy.newlines)
        extra = rows * tile * (columns * tile + end) + spec.side // MERGE * end + 1
        return ItemGeometry(1, spec.side, spec.side, MERGE, extra=extra, tiles=(rows, columns))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        assert isinstance(item, ImageItem)
        spec: SquareSpec = self.specs["image"]
        *cut, whole = spec.tiling.plan(*item.header.size).views
        frames, grid = item.pixels[None], self.geometry(item.header)
        tiles = torch.empty(0, 3 * spec.patch**2, dtype=dtype)
        if cut:
            tiles = patch_rows(frames, CropPlan(tuple(cut)), spec, spec.patch, dtype=dtype)
        made = torch.tensor((*grid.tiles, self.strategy.tile * MERGE, spec.side))
        return {
            "pixel_values": FieldElem(patch_rows(frames, CropPlan((whole,)), spec, spec.patch, dtype=dtype), FlatField()),
            "pixel_values_local": FieldElem(tiles, FlatField()),
            "tiles": FieldElem(made, BatchedField(keep_on_cpu=True)),
        }, grid

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Fewer tiles, or the whole alone at a tile's size."""
        whole, tile = (side * (side + self.strategy.newlines) for side in (self.strategy.whole, self.strategy.tile))
        tiles = (rows - 1 - whole) // tile
        if grid[1] == self.strategy.tile * MERGE or rows < 1 + tile:
            return None
        return {"detail": "low"} if tiles < 1 else {"min_patches": 1, "max_patches": tiles}


class DeepseekOcrProcessingInfo(DeepseekOcr2ProcessingInfo):
    """ProcessingInfo of the first DeepSeek-OCR."""

    strategy = V1
