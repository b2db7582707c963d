"""Input processing of DeepSeek-VL2: the whole image padded to a square, then the image padded to the best size and cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....mm.fields import BatchedField, FieldElem
from ....mm.tiling.canvas import PaddedTiles
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.files import find_template
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.options import is_low_detail

_TEMPLATE = """
{{- bos_token -}}
{%- for m in messages -%}
  {{- {'user': '<|User|>: ', 'assistant': '<|Assistant|>: '}.get(m.role, '') -}}
  {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}
    {%- if part.type == 'image' -%}{{ '<image>\\n' }}
    {%- elif part.type == 'text' -%}{{ part.text }}
    {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
  {%- endfor -%}
  {{- {'user': '\\n\\n', 'assistant': eos_token}.get(m.role, '\\n\\n') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|Assistant|>:' }}{%- endif -%}"""


class DeepseekVL2ProcessingInfo(TiledInfo):
    """ProcessingInfo of DeepSeek-VL2. Prompts of more than two images cut none of them, as published.

    The tensor `tiles` int64 `[2]` has the rows and columns of tiles, which follow the whole image.
    """

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "<image>")}
    valid_kwargs = {"image": (*TILE_KWARGS, "crop_to_patches")}
    default_kwargs = {"resample": "pillow"}

    def resolve_spec(self, modality: str) -> TileSpec:
        config, options = self.files.config, self.merged_kwargs[modality]
        vision = config.get("vision_config") or {}
        side, patch = positive_int_or(vision, "image_size", 384), positive_int_or(vision, "patch_size", 16)
        cut = options.get("crop_to_patches", True) and not is_low_detail(options)
        candidates = config.get("candidate_resolutions") if cut else None
        sizes = tuple(
            height_width(size, "candidate_resolutions")[::-1] for size in candidates or [side]
        )  # stored as width, height
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patch=patch)
        spec = read_pixel_spec(self.files.image, spec, options)
        fill = tuple(int(255 * mean) for mean in spec.mean)
        return replace(spec, tiling=PaddedTiles(side, sizes, (fill[0], fill[1], fill[2])))

    @property
    def chat_template(self) -> str | None:  # type: ignore[override]
        return None if self.files.folder and find_template(self.files.folder) else _TEMPLATE

    def prompt_kwargs(self, items: Mapping[str, int]) -> Mapping[str, Any]:
        return {"crop_to_patches": False} if items.get("image", 0) > 2 else {}

    @property
    def side(self) -> int:
        """Rows along a side of a tile."""
        spec: TileSpec = self.specs["image"]
        merge = positive_int_or(self.files.config.get("projector_config") or {}, "downsample_ratio", 2)
        return -(-(spec.tiling.plan(1, 1).views[0].tile_size[0] // spec.patch) // merge)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid, side, (tall, wide) = super().geometry(header), self.side, self.plan(header).tiles
        rows = side * (side + 1) + 1 + tall * side * (wide * side + 1)
        return replace(grid, extra=rows - grid.num_embeds)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        kwargs, grid = super().process(item, dtype)
        tiles = torch.tensor(self.plan(item.header).tiles)
        return {**kwargs, "tiles": FieldElem(tiles, BatchedField(keep_on_cpu=True))}, grid

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        uncut = 2 * self.side * (self.side + 1) + 1
        return {"crop_to_patches": False} if grid[0] > 2 and rows >= uncut else None
