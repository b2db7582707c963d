"""Input processing of Aya Vision and Cohere2-Vision: tiles of one size, with text or line breaks between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from ....mm.tiling.aspect import AspectTiles, ScaleTiles
from ....mm.tiling.whole import FixedSize
from ....mm.types import ItemGeometry
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import read_pixel_spec
from ....processors.interface import Span
from ....processors.options import MAX_TILES, is_low_detail
from ....processors.spans import Piece, build_span

_KEPT_SPANS = 32  # by number of tiles


class Cohere2VisionProcessingInfo(TiledInfo):
    """ProcessingInfo of Cohere2-Vision: the tiles that enlarge an image least, each followed by a line break."""

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "image_token_index", 255036)}
    valid_kwargs = {"image": (*TILE_KWARGS, "crop_to_patches", "max_patches", "min_patches")}
    tiling: ClassVar[type[AspectTiles]] = ScaleTiles
    overrides: ClassVar[Mapping[str, Any]] = {}  # options of the published processor that replace the preprocessor's JSON
    defaults: ClassVar[Mapping[str, Any]] = {"size": 512, "patch_size": 16, "crop_to_patches": True}

    def resolve_spec(self, modality: str) -> TileSpec:
        config, json = (
            self.files.config,
            {**self.defaults, **self.files.image, **self.overrides, **self.merged_kwargs[modality]},
        )
        tile = height_width(json["size"])
        vision = config.get("vision_config") or self.defaults
        self.check_config("vision_config", image_size=tile[0])
        most, least = positive_int_or(json, "max_patches", 12, MAX_TILES), positive_int_or(json, "min_patches", 1)
        tiled = json["crop_to_patches"] and not is_low_detail(json)
        tiling = self.tiling(tile, least, most) if tiled else FixedSize(tile)
        spec = TileSpec(tiling=tiling, patch=vision.get("patch_size", 16), merge=config.get("downsample_factor", 2))
        return read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the span; images of as many tiles share it, because it holds a text per tile."""
        key = geometry.t, geometry.num_embeds
        if key not in self._spans:
            if len(self._spans) >= _KEPT_SPANS:
                self._spans.clear()
            self._spans[key] = self._new_span(modality, geometry)
        return self._spans[key]

    @cached_property
    def _spans(self) -> dict[tuple[int, int], Span]:
        return {}

    def _new_span(self, modality: str, geometry: ItemGeometry) -> Span:
        rows, pieces = geometry.num_embeds // geometry.t, list[Piece]()
        for number in range(1, geometry.t + 1):
            pieces += [*self.before(number, geometry.t), rows, *self.after()]
        start, end = (self.special_token_id(f"<|{word}_OF_IMG|>") for word in ("START", "END"))
        return build_span([(start,), *pieces, (end,)], self.placeholder_ids[modality])

    def before(self, number: int, tiles: int) -> Sequence[Piece]:
        """Return the tokens before a tile, which is counted from 1."""
        return ()

    def after(self) -> Sequence[Piece]:
        """Return the tokens after a tile."""
        return [(self.special_token_id("<|IMG_LINE_BREAK|>"),)]

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        """Return options for at most this many tiles, of which the thumbnail is one."""
        return {"max_patches": max(1, tiles - 1), "min_patches": 1}


class AyaVisionProcessingInfo(TextPlaceholders, Cohere2VisionProcessingInfo):
    """ProcessingInfo of Aya Vision: tiles of the nearest aspect ratio, each after its number as text."""

    tiling = AspectTiles
    defaults = {"size": 384, "patch_size": 14}
    overrides = {"crop_to_patches": True}
    placeholder_texts = {"image": "<image>"}

    def before(self, number: int, tiles: int) -> Sequence[Piece]:
        return [self.encode("TILE_GLOBAL" if number == tiles else f"TILE_{number}")]

    def after(self) -> Sequence[Piece]:
        return ()
