"""Input processing of GOT-OCR2: each image resized to one size, or cut into tiles if `crop_to_patches` asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError
from ....mm.tiling.aspect import AspectTiles
from ....mm.tiling.whole import FixedSize
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import read_pixel_spec
from ....processors.options import MAX_TILES, is_low_detail

_MERGE = 4  # patches along a side of a row, after two convolutions
_TEMPLATE = """
{%- if messages[0].role != 'system' -%}
  {{- '<|im_start|>system\\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>' -}}
{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\\n' -}}
  {%- if m.content is string -%}{{ m.content }}
  {%- else -%}
    {%- set images = m.content | selectattr('type', 'equalto', 'image') | list -%}
    {%- if images -%}{{ '<img>' ~ '<imgpad>' * images | length ~ '</img>\\n' }}{%- endif -%}
    {%- for part in m.content -%}
      {%- if part.type == 'text' -%}{{ part.text }}
      {%- elif part.type != 'image' -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


class GotOcr2ProcessingInfo(TiledInfo):
    """ProcessingInfo of GOT-OCR2. Patches come row by row; the model merges them. Images are before a message's text."""

    modalities = ("image",)
    placeholders = {"image": ("image_token_index", "image_token_id", "im_patch_token", 151859)}
    valid_kwargs = {"image": (*TILE_KWARGS, "crop_to_patches", "max_patches", "min_patches")}
    text_config_defaults = {"vocab_size": 151860, "hidden_size": 1024}
    chat_template = _TEMPLATE
    end_tokens = ("<|im_end|>",)

    def resolve_spec(self, modality: str) -> TileSpec:
        json, vision = self.files.image, self.files.config.get("vision_config") or {}
        patch = height_width(vision.get("patch_size", 16), "patch_size")[0]
        tile, expected = height_width(json.get("size") or 1024), height_width(vision.get("image_size", 1024), "image_size")
        if tile != expected or tile[0] != tile[1] or tile[0] % (patch * _MERGE):
            sides = f"{tile[0]}x{tile[1]} pixels, image_size in vision_config says {expected[0]}x{expected[1]}"
            raise ConfigError(f"images of this model are squares of whole rows, but its preprocessor makes {sides}")
        spec = TileSpec(tiling=self._tiling(tile), patch=patch)
        return read_pixel_spec(json, spec, self.merged_kwargs[modality])

    def _tiling(self, tile: tuple[int, int]) -> AspectTiles | FixedSize:
        options = self.merged_kwargs["image"]  # the published processor reads these from the call only
        if is_low_detail(options) or not options.get("crop_to_patches"):
            return FixedSize(tile)
        most = positive_int_or(options, "max_patches", 12, MAX_TILES)
        return AspectTiles(tile, positive_int_or(options, "min_patches", 1), most)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), merge=_MERGE)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer tiles; None if a single one is too large."""
        tiles = rows * _MERGE**2 // (grid[1] * grid[2])
        if tiles < 1 or grid[0] == 1:
            return None
        return {"detail": "low"} if tiles < 3 else {"min_patches": 1, "max_patches": tiles - 1}


class GotProcessingInfo(GotOcr2ProcessingInfo):
    """ProcessingInfo of the publisher's own layout, which resizes with Pillow."""

    default_kwargs = {"resample": "pillow"}
