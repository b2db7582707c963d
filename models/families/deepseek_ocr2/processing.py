"""Input processing of DeepSeek-OCR: tiles of the best aspect ratio, then the whole image padded to a square, and a separator.

Sources: arXiv 2510.18234 (DeepSeek-OCR), 2601.20552 (DeepSeek-OCR 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....callers.errors import ConfigError
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.tiling.aspect import AspectTiles, PaddedSquareTiles
from ....mm.tiling.plan import CropPlan
from ....mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.base import BaseProcessingInfo
from ....processors.bases.tiles import TILE_KWARGS, height_width, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PixelSpec, patchify_crops, read_pixel_spec
from ....processors.options import MAX_TILES, is_low_detail

MERGE = 4  # patches along a side that make one row
GREY = (127, 127, 127)
_ONE_SQUARE = PaddedSquareTiles(1024, GREY, None)
_TEMPLATE = """
{{- bos_token -}}
{%- for m in messages -%}
  {%- set parts = [{'type': 'text', 'text': m.content}] if m.content is string else m.content -%}
  {%- for part in parts -%}
    {%- if part.type == 'image' -%}{{ '<image>\\n' }}
    {%- elif part.type != 'text' -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
  {%- endfor -%}
  {%- if grounding and m.role == 'user' -%}{{ '<|grounding|>' }}{%- endif -%}
  {%- for part in parts -%}
    {%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}
  {%- endfor -%}
{%- endfor -%}"""


@dataclass(frozen=True)
class RowLayout:
    """Layout of the rows of an image.

    Args:
        whole_side, tile_side: rows along a side of the whole image, and of a tile.
        max_tiles: default limit on the tiles of an image.
        newlines: a learned row ends each line.
        shrinks_uncut: an image that is not cut into tiles has the size of a tile, not of a whole image.
    """

    whole_side: int = 16
    tile_side: int = 12
    max_tiles: int = 6
    newlines: bool = False
    shrinks_uncut: bool = True


V1, V2 = RowLayout(tile_side=10, max_tiles=9, newlines=True), RowLayout()


@dataclass(frozen=True)
class SquareSpec(PixelSpec):
    """Parameters for cutting images into tiles, and tiles into patches of `patch` pixels a side."""

    tiling: PaddedSquareTiles = _ONE_SQUARE
    patch: int = 16

    @property
    def side(self) -> int:
        """Patches along a side of the whole image."""
        return self.tiling.square // self.patch


def _published(vision: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of vision_config in the publisher's layout; empty in the Hub's."""
    width = vision.get("width")
    part = width.get(name) if isinstance(width, Mapping) else None
    return part if isinstance(part, Mapping) else {}


class DeepseekOcr2ProcessingInfo(BaseProcessingInfo):
    """ProcessingInfo of DeepSeek-OCR 2 and, with another row_layout, of DeepSeek-OCR.

    The models have no turns: the template writes the images of a message and then its texts. With `grounding` it writes the
    control token `<|grounding|>` between them.

    The tensors are `pixel_values_local` (tiles) and `pixel_values` (whole image) `[patches, 3 * patch^2]`, row by row, and
    `tiles` int64 `[4]`: rows and columns of tiles, patches along a side of a tile, and of the whole image.
    """

    element_format = "ref_det"
    ocr_prompts: Sequence[str] = ("deepseek-grounding",)
    row_layout: ClassVar[RowLayout] = V2
    chat_template = _TEMPLATE
    modalities = ("image",)
    placeholders = {"image": ("image_token_id", 128815)}
    valid_kwargs = {"image": (*TILE_KWARGS, "crop_to_patches", "max_patches", "min_patches")}

    def resolve_spec(self, modality: str) -> SquareSpec:
        json, vision = self.files.image, self.files.config.get("vision_config") or {}
        sam = vision.get("sam_config") or _published(vision, "sam_vit_b")
        patch = height_width(sam.get("patch_size", 16), "patch_size")[0]
        options = {"crop_to_patches": True, **json, **self.merged_kwargs[modality]}
        whole = self._square(json, "size", self.row_layout.whole_side * MERGE * patch)
        tile = self._square(json, "tile_size", self.row_layout.tile_side * MERGE * patch)
        fill = tuple(json.get("background_color", GREY))
        most = positive_int_or(options, "max_patches", self.row_layout.max_tiles, MAX_TILES)
        tiles = AspectTiles((tile, tile), positive_int_or(options, "min_patches", 2), most)
        cut = options["crop_to_patches"] and not is_low_detail(options)
        uncut = tile if self.row_layout.shrinks_uncut else whole
        tiling = PaddedSquareTiles(whole, fill, tiles) if cut else PaddedSquareTiles(uncut, fill, None)
        spec = SquareSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, tiling=tiling, patch=patch)
        return read_pixel_spec(json, spec, self.merged_kwargs[modality])

    def _square(self, json: Mapping[str, Any], name: str, side: int) -> int:
        tall, wide = height_width(json.get(name) or side, name)
        if (tall, wide) != (side, side):
            raise ConfigError(f"{name} in the preprocessor JSON is {tall}x{wide}, this model takes {side}x{side}")
        return side

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        spec: SquareSpec = self.specs["image"]
        rows, columns = spec.tiling.plan(*header.size).tiles
        tile, end = self.row_layout.tile_side, int(self.row_layout.newlines)
        extra = rows * tile * (columns * tile + end) + spec.side // MERGE * end + 1
        return ItemGeometry(1, spec.side, spec.side, MERGE, extra=extra, tiles=(rows, columns))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        assert isinstance(item, ImageItem)
        spec: SquareSpec = self.specs["image"]
        *cut, whole = spec.tiling.plan(*item.header.size).views
        frames, grid = item.pixels[None], self.geometry(item.header)
        tiles = torch.empty(0, 3 * spec.patch**2, dtype=dtype)
        if cut:
            tiles = patchify_crops(frames, CropPlan(tuple(cut)), spec, PatchLayout(spec.patch), dtype)
        numbers = torch.tensor((*grid.tiles, self.row_layout.tile_side * MERGE, spec.side))
        return {
            "pixel_values": FieldElem(
                patchify_crops(frames, CropPlan((whole,)), spec, PatchLayout(spec.patch), dtype), FlatField()
            ),
            "pixel_values_local": FieldElem(tiles, FlatField()),
            "tiles": FieldElem(numbers, BatchedField(keep_on_cpu=True)),
        }, grid

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer tiles, or for only the whole image at the size of a tile."""
        whole, tile = (
            side * (side + self.row_layout.newlines) for side in (self.row_layout.whole_side, self.row_layout.tile_side)
        )
        tiles = (rows - 1 - whole) // tile
        if grid[1] == self.row_layout.tile_side * MERGE or rows < 1 + tile:
            return None
        return {"detail": "low"} if tiles < 1 else {"min_patches": 1, "max_patches": tiles}


class DeepseekOcrProcessingInfo(DeepseekOcr2ProcessingInfo):
    """ProcessingInfo of DeepSeek-OCR."""

    row_layout = V1
