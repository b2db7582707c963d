"""Input processing of Llama 4: an image in tiles of the best canvas, then as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError
from ....mm.tiling.canvas import CanvasTiles
from ....mm.types import ItemGeometry
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.interface import Span
from ....processors.options import MAX_TILES, is_low_detail
from ....processors.spans import Piece, build_span


class Llama4ProcessingInfo(TiledInfo):
    """ProcessingInfo of Llama 4."""

    modalities = ("image",)
    placeholders = {"image": ("<|image|>",)}
    valid_kwargs = {"image": (*TILE_KWARGS, "max_patches", "resize_to_max_canvas")}

    def resolve_token_ids(self) -> None:
        self.patch_token = self.config_token_id("image_token_index", "image_token_id", 200092)

    def resolve_spec(self, modality: str) -> TileSpec:
        json, vision = {**self.files.image, **self.merged_kwargs[modality]}, self.files.config.get("vision_config") or {}
        sides = height_width(json.get("size") or 336)
        if {*sides} != {vision.get("image_size", sides[0])}:
            raise ConfigError(f"tiles of {sides} pixels do not fit image_size in vision_config; download the checkpoint again")
        most = 1 if is_low_detail(json) else positive_int_or(json, "max_patches", 16, MAX_TILES)
        spec = TileSpec(
            IMAGENET_STANDARD_MEAN,
            IMAGENET_STANDARD_STD,
            filter="bilinear",
            bfloat16=True,
            tiling=CanvasTiles(sides[0], most, bool(json.get("resize_to_max_canvas", False))),
            patch=vision.get("patch_size", 14),
            merge=round(1 / vision.get("pixel_shuffle_ratio", 0.5)),
        )
        both = self.files.image.get("do_rescale", True) and self.files.image.get("do_normalize", True)
        return replace(read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality]), bfloat16=both)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the tiles row by row, with separators between and after them, then the whole image after `<|image|>`."""
        rows, columns = geometry.tiles
        each, pieces = geometry.num_embeds // geometry.t, list[Piece]()
        for _ in range(rows if geometry.t > 1 else 0):
            line: list[Piece] = [each, (self.special_token_id("<|tile_x_separator|>"),)] * columns
            pieces += [*line[:-1], (self.special_token_id("<|tile_y_separator|>"),)]
        first, last = ((self.special_token_id(f"<|image_{end}|>"),) for end in ("start", "end"))
        return build_span([first, *pieces, (self.placeholder_ids[modality],), each, last], self.patch_token)

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        """Return options for at most this many tiles, of which the whole image is one."""
        return {"max_patches": max(1, tiles - 1)}
