"""Input processing of Pixtral and Mistral 3: images at native resolution, with a break token after each line of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

from ....mm.tiling.whole import BoundedResize, KeptSize
from ....mm.types import ItemGeometry
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import read_pixel_spec
from ....processors.interface import Span, TokenRun
from ....processors.options import is_low_detail

LOW_DETAIL_EDGE = 512  # pixels of the longer side with detail="low"


class PixtralProcessingInfo(TiledInfo):
    """ProcessingInfo of Pixtral: the longer side is bounded, and sides are multiples of a merged patch.

    `default_edge`: bound of the longer side; 0: `image_size` of the tower. `round_to_nearest`: shrunk sides are rounded to
    the nearest pixel instead of down.
    """

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "image_token_index", "[IMG]")}
    valid_kwargs = {"image": (*TILE_KWARGS, "max_pixels", "size")}
    embeds_layout = "grid"
    default_merge: ClassVar[int] = 1
    default_edge: ClassVar[int] = 1024
    round_to_nearest: ClassVar[bool] = False

    def resolve_spec(self, modality: str) -> TileSpec:
        vision, json = self.files.config.get("vision_config") or {}, {**self.files.image, **self.merged_kwargs[modality]}
        merge = self.files.config.get("spatial_merge_size", self.default_merge)
        spec = TileSpec(patch=height_width(vision.get("patch_size", 16))[0], merge=merge)
        spec = read_pixel_spec({**self.files.image, "do_resize": True}, spec, self.merged_kwargs[modality])
        most = height_width(json.get("size") or self.default_edge or vision.get("image_size", 1024))
        if is_low_detail(json):
            most = (min(most[0], LOW_DETAIL_EDGE), min(most[1], LOW_DETAIL_EDGE))
        if "max_pixels" in json:  # a square of that area holds every shape of at most that area
            edge = int(positive_int_or(json, "max_pixels", 1) ** 0.5)
            most = (min(most[0], max(1, edge)), min(most[1], max(1, edge)))
        if not self.files.image.get("do_resize", True):
            return replace(spec, tiling=KeptSize(spec.patch, spec.merge, max(most)))
        return replace(spec, tiling=BoundedResize(most, (spec.patch * spec.merge,) * 2, self.round_to_nearest))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return `[IMG]` once per row, `[IMG_BREAK]` after each line but the last, and `[IMG_END]`."""
        _, lines, width = geometry.merged
        stop, end = (self.special_token_id("[IMG_BREAK]"),), (self.special_token_id("[IMG_END]"),)
        row = TokenRun((self.placeholder_ids["image"],), width, True)
        return Span(lines * (width + 1), lines * width, lambda: [*[row, TokenRun(stop)] * (lines - 1), row, TokenRun(end)])

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options that shorten the longer side; the other side shrinks with it and is rounded up to a full row.

        None if images keep their size.
        """
        spec = self.specs[modality]
        if isinstance(spec.tiling, KeptSize):
            return None
        short, long = sorted(side // spec.merge for side in grid[1:])
        for longest in range(long - 1, 0, -1):
            # long - 1: the last line of patches may hold a single line of pixels
            if longest * ceil(short * longest / (long - 1)) <= rows:
                return {"size": {"longest_edge": longest * spec.patch * spec.merge}}
        return None


class Mistral3ProcessingInfo(PixtralProcessingInfo):
    """ProcessingInfo of Mistral 3, which merges patches."""

    default_merge, default_edge = 2, 1540


class MistralFormatProcessingInfo(PixtralProcessingInfo):
    """ProcessingInfo of Pixtral and Mistral 3 in the publisher's layout: the tower's `image_size` bounds the longer side."""

    round_to_nearest, default_edge = True, 0
