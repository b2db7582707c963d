"""What LightOnOCR wants to be fed: pages at their own size, in whole patches but not in whole squares. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from ..mm.errors import InputError
from ..mm.tiling import Bounded
from ..mm.types import ItemGeometry, MediaHeader
from .pixtral import PixtralProcessingInfo
from .tiles import TiledInfo, TileSpec, pair


class LightOnOcrProcessingInfo(PixtralProcessingInfo):
    """ProcessingInfo of LightOnOCR: sides are multiples of the preprocessor's own patch size, which is one patch as published.

    So they may be odd in patches: the tower sees the last line and column then, but no row is made of them. Patches come
    row by row, their squares are joined behind the tower.
    """

    slots = {"image": ("image_token_id", 151655)}
    rows = "count"
    merge = 2
    span = TiledInfo.span  # rows only, no breaks

    @property
    def square(self) -> int:
        """Patches along a side of what makes one row."""
        return int(self.files.config.get("spatial_merge_size", self.merge))

    def read(self, modality: str) -> TileSpec:
        base = super().read(modality)
        assert isinstance(base.tiling, Bounded)
        step = pair(self.files.image.get("patch_size") or 16, "patch_size")
        return replace(base, merge=1, tiling=replace(base.tiling, multiple=step))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = replace(super().geometry(header), merge=self.square)
        if not grid.num_embeds:
            least = f"{self.square} x {self.square} patches of {self.specs['image'].patch} pixels"
            raise InputError(f"its {header.width}x{header.height} pixels make less than {least}; enlarge or crop it")
        return grid

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """A shorter longer side; the other one shrinks with it, and is filled up to a whole step."""
        spec, (step, _) = self.specs[modality], self.specs[modality].tiling.multiple
        short, long = sorted(ceil(side * spec.patch / step) for side in grid[1:])
        for longest in range(long - 1, 0, -1):
            tall, wide = (n * step // (spec.patch * self.square) for n in (ceil(short * longest / (long - 1)), longest))
            if tall * wide <= rows:
                return {"size": {"longest_edge": longest * step}}
        return None
