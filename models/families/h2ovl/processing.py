"""Input processing of H2OVL-Mississippi: InternVL's tiles, or tiles at two scales ("MSAC": multi-scale adaptive cropping).

Sources: image_process.py, conversation.py and configuration_h2ovl_chat.py of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....mm.tiling.aspect import AspectTiles, nearest_grid
from ....mm.tiling.plan import CropPlan, Resize, Size, TiledView
from ....mm.tiling.sizes import arrangements
from ....mm.tiling.whole import FixedSize
from ..internvl.processing import IMAGE_KWARGS, TEMPLATES, InternVLChatProcessingInfo

FEWEST_TILES = 3  # of the second grid
CHAT_TEMPLATE = """
{%- for m in messages -%}
  {{- {'user': '<|prompt|>', 'assistant': '<|answer|>', 'system': ''}[m.role] -}}
  {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}
    {%- if part.type == 'image' -%}{{ '<IMG_CONTEXT>\\n' }}
    {%- elif part.type == 'text' -%}{{ part.text }}
    {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
  {%- endfor -%}
  {{- '' if m.role == 'system' else '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|answer|>' }}{%- endif -%}"""


@dataclass(frozen=True)
class TwoScaleTiles(AspectTiles):
    """The tiles of a second grid, those of the grid of AspectTiles, and the whole image as one tile.

    The second grid has at least FEWEST_TILES tiles, and the nearest aspect ratio of those whose rows do not divide the rows of
    the first grid and whose columns do not divide its columns, so that it cuts the image at other places. A grid of one tile
    adds none.
    """

    def plan(self, height: int, width: int) -> CropPlan:
        first = super().plan(height, width)
        coarse, whole = first.views[:-1], first.views[-1:]
        fine = self.second_grid(height, width, self.arrangement(height, width))
        if fine == (1, 1):
            return first
        rows, columns = fine
        cut = TiledView((Resize(self.tile[0] * rows, self.tile[1] * columns),), rows, columns)
        return CropPlan((cut, *coarse, *whole), fine)

    def second_grid(self, height: int, width: int, first: Size) -> Size:
        """Return rows and columns of the second grid; (1, 1) if there is none."""
        grids = arrangements(FEWEST_TILES, self.max_tiles)
        others = (grid for grid in grids if all(side % other for side, other in zip(first, grid, strict=True)))
        return nearest_grid(others, height, width, self.tile)


class H2OVLProcessingInfo(InternVLChatProcessingInfo):
    """ProcessingInfo of H2OVL. Each of several images of a prompt is tiled once, as published, unless `use_msac` is given."""

    valid_kwargs = {"image": (*IMAGE_KWARGS, "use_msac")}
    option_values = {"use_msac": (True, False)}
    templates = {**TEMPLATES, "h2ogpt2": CHAT_TEMPLATE}
    end_tokens = ("<|end|>",)

    def prompt_kwargs(self, items: Mapping[str, int]) -> Mapping[str, Any]:
        several = items.get("image", 0) > 1 and "use_msac" not in self.merged_kwargs["image"]
        return {"use_msac": False} if several else {}

    def _tiling(self, tile: tuple[int, int]) -> AspectTiles | FixedSize:
        tiling = super()._tiling(tile)
        use_msac = self.merged_kwargs["image"].get("use_msac", self.files.config.get("use_msac", False))
        return TwoScaleTiles(tile, 1, tiling.max_tiles) if use_msac and isinstance(tiling, AspectTiles) else tiling

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        """Return options for at most this many tiles; two grids of fewer than FEWEST_TILES tiles are one."""
        if not isinstance(self.specs["image"].tiling, TwoScaleTiles):
            return super().max_tiles_kwargs(tiles)
        return {"max_patches": max(1, min(FEWEST_TILES - 1, tiles - 1), (tiles - 1) // 2), "min_patches": 1}
