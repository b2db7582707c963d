"""What LightOnOCR wants to be fed: pages at their own size, in whole patches but not in whole squares. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ..mm.errors import InputError
from ..mm.tiling import Bounded
from ..mm.types import ItemGeometry, MediaHeader
from .pixtral import PixtralProcessingInfo
from .tiles import TiledInfo, TileSpec, pair


@dataclass(frozen=True)
class PageSpec(TileSpec):
    """`merge` is 1, patches come row by row; `square`: along its sides, patches that are joined behind the tower."""

    square: int = 2


class LightOnOcrProcessingInfo(PixtralProcessingInfo):
    """ProcessingInfo of LightOnOCR: sides are multiples of the preprocessor's own patch size, which is one patch as published.

    So they may be odd in patches: the tower sees the last line and column then, but no row is made of them.
    """

    slots = {"image": ("image_token_id", 151655)}
    rows = "count"
    merge = 2
    span = TiledInfo.span  # rows only, no breaks

    def read(self, modality: str) -> PageSpec:
        base = super().read(modality)
        assert isinstance(base.tiling, Bounded)
        step = pair(self.files.image.get("patch_size", 16), "patch_size")
        tiling = replace(base.tiling, multiple=step)
        return PageSpec(base.mean, base.std, base.rescale, base.filter, base.resample, tiling, base.patch, 1, base.merge)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        spec = self.specs["image"]
        grid = replace(super().geometry(header), merge=spec.square)
        if not grid.num_embeds:
            least = f"{spec.square} x {spec.square} patches of {spec.patch} pixels"
            raise InputError(f"its {header.width}x{header.height} pixels make less than {least}; enlarge or crop it")
        return grid

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """A shorter longer side; the other one shrinks with it, and is filled up to a whole step."""
        spec, (step, _) = self.specs[modality], self.specs[modality].tiling.multiple
        short, long = sorted(ceil(side * spec.patch / step) for side in grid[1:])
        for longest in range(long - 1, 0, -1):
            tall, wide = (n * step // (spec.patch * spec.square) for n in (ceil(short * longest / (long - 1)), longest))
            if tall * wide <= rows:
                return {"size": {"longest_edge": longest * step}}
        return None
