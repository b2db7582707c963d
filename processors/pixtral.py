"""What Pixtral and Mistral 3 want to be fed: pictures at their own size, line by line with break tokens. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

from ..mm.tiling import Bounded
from ..mm.types import ItemGeometry
from .base import build_span
from .interface import Span
from .pictures import read_pixels, with_resample
from .tiles import DETAIL, TiledInfo, TileSpec, is_low, number_of, pair

LOW = 512  # pixels of the longer side, as detail="low" means


class PixtralProcessingInfo(TiledInfo):
    """ProcessingInfo of Pixtral: the longer side is bounded, sides are whole numbers of merged patches."""

    modalities = ("image",)
    slots = {"image": ("image_token_id", "image_token_index", "[IMG]")}
    known = {"image": (*DETAIL, "max_pixels", "size")}
    rows = "grid"
    patch: ClassVar[int] = 16
    merge: ClassVar[int] = 1
    edge: ClassVar[int] = 1024
    nearest: ClassVar[bool] = False

    def read(self, modality: str) -> TileSpec:
        vision, json = self.files.config.get("vision_config") or {}, {**self.files.image}
        merge = self.files.config.get("spatial_merge_size", self.merge)
        spec = read_pixels(json, TileSpec(patch=pair(vision.get("patch_size", self.patch))[0], merge=merge))
        for layer in self.layers[modality]:
            spec, json = with_resample(spec, layer), json | layer
        most = pair(json.get("size") or self.edge or vision.get("image_size", 1024))
        if is_low(json):
            most = (min(most[0], LOW), min(most[1], LOW))
        if "max_pixels" in json:  # a square of that area holds every shape of at most that area
            edge = int(number_of(json, "max_pixels", 1) ** 0.5)
            most = (min(most[0], max(1, edge)), min(most[1], max(1, edge)))
        return replace(spec, tiling=Bounded(most, (spec.patch * spec.merge,) * 2, self.nearest))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """`[IMG]` once per row of a line, `[IMG_BREAK]` behind each line but the last, `[IMG_END]`."""
        _, lines, width = geometry.merged
        stop, end = (self.special("[IMG_BREAK]"),), (self.special("[IMG_END]"),)
        pieces: list[tuple[int, ...] | int] = [width, stop]
        return build_span([*pieces * (lines - 1), width, end], self.slot_ids["image"])

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """A shorter longer side; the other one shrinks with it, and is filled up to a whole row."""
        spec = self.specs[modality]
        short, long = sorted(side // spec.merge for side in grid[1:])
        for longest in range(long - 1, 0, -1):
            if longest * ceil(short * longest / (long - 1)) <= rows:  # the last row may hold one pixel only
                return {"size": {"longest_edge": longest * spec.patch * spec.merge}}
        return None


class Mistral3ProcessingInfo(PixtralProcessingInfo):
    """ProcessingInfo of Mistral 3, whose patches are merged."""

    patch, merge, edge = 14, 2, 1540


class MistralFormatProcessingInfo(PixtralProcessingInfo):
    """ProcessingInfo of either in their publisher's own layout: sizes are rounded, and bounded by the tower's."""

    nearest, edge = True, 0
