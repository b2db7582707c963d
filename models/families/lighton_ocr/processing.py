"""Input processing of LightOnOCR: pages at native resolution. Sides are full patches, but not always full merged patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from ....callers.errors import InputError
from ....mm.tiling.whole import BoundedResize, KeptSize
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.tiles import TiledInfo, TileSpec, height_width
from ..pixtral.processing import PixtralProcessingInfo


class LightOnOcrProcessingInfo(PixtralProcessingInfo):
    """ProcessingInfo of LightOnOCR: sides are multiples of the preprocessor's patch size, which is one patch as published.

    So a side may be an odd number of patches: the tower then sees the last row or column of patches, but they make no row.
    Patches are in row-major order; the model merges them after the tower.
    """

    placeholders = {"image": ("image_token_id", "image_token_index", 151655)}
    embeds_layout = "count"
    element_format = "image_boxes"  # of the checkpoints that locate pictures
    default_merge = 2
    span = TiledInfo.span  # rows only, no break tokens

    @property
    def merge(self) -> int:
        """Patches along a side of one row."""
        return int(self.files.config.get("spatial_merge_size", self.default_merge))

    def resolve_spec(self, modality: str) -> TileSpec:
        base = super().resolve_spec(modality)
        if isinstance(base.tiling, KeptSize):
            return replace(base, merge=1, tiling=replace(base.tiling, merge=1))
        assert isinstance(base.tiling, BoundedResize)
        step = height_width(self.files.image.get("patch_size") or 16, "patch_size")
        return replace(base, merge=1, tiling=replace(base.tiling, multiple=step))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = replace(super().geometry(header), merge=self.merge)
        if not grid.num_embeds:
            least = f"{self.merge} x {self.merge} patches of {self.specs['image'].patch} pixels"
            raise InputError(f"its {header.width}x{header.height} pixels are less than {least}; enlarge or crop it")
        return grid

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options that shorten the longer side; the other side shrinks with it and is rounded up to a full step.

        None if images keep their size.
        """
        spec = self.specs[modality]
        if isinstance(spec.tiling, KeptSize):
            return None
        step, _ = spec.tiling.multiple
        short, long = sorted(ceil(side * spec.patch / step) for side in grid[1:])
        for longest in range(long - 1, 0, -1):
            tall, wide = (n * step // (spec.patch * self.merge) for n in (ceil(short * longest / (long - 1)), longest))
            if tall * wide <= rows:
                return {"size": {"longest_edge": longest * step}}
        return None
