"""Input processing of Granite Docling (500M): tiles of the best aspect ratio, each after its tag, then the whole page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError
from ....mm.tiling.aspect import AspectTiles, PageTiles
from ....mm.tiling.whole import FixedSize
from ....mm.types import ItemGeometry
from ....processors.bases.tiles import TILE_KWARGS, TileSpec, height_width, positive_int_or
from ....processors.images import read_pixel_spec
from ....processors.interface import Span
from ....processors.options import MAX_TILES, is_low_detail
from ....processors.spans import Piece, build_span
from ..idefics3.processing import Idefics3ProcessingInfo


class GraniteDoclingProcessingInfo(Idefics3ProcessingInfo):
    """ProcessingInfo of Granite Docling."""

    plain_tokens = ()
    placeholders = {"image": ("image_token_id", 100337)}
    text_config_defaults = {"vocab_size": 133800, "hidden_size": 1024}
    valid_kwargs = {"image": (*TILE_KWARGS, "crop_to_patches", "max_patches", "min_patches")}

    @property
    def embed_width(self) -> int:
        """Width of an encoder row: one hidden size for the decoder's input, and one per deepstack level."""
        vision = self.files.config.get("vision_config") or {}
        return super().embed_width * (1 + len(vision.get("deepstack_visual_indexes", (3, 7, 10))))

    def resolve_spec(self, modality: str) -> TileSpec:
        json, vision = self.files.image, self.files.config.get("vision_config") or {}
        tile, side = height_width(json.get("size") or 512), height_width(vision.get("image_size", 512), "image_size")
        if tile != side or tile[0] != tile[1]:
            raise ConfigError(f"image_size in vision_config is {side}, but the processor's tiles are {tile}")
        patch, merge = height_width(vision.get("patch_size", 16), "patch_size")[0], vision.get("scale_factor", 4)
        spec = TileSpec(tiling=self._tiling(tile), patch=patch, merge=merge)
        return read_pixel_spec(json, spec, self.merged_kwargs[modality])

    def _tiling(self, tile: tuple[int, int]) -> AspectTiles | FixedSize:
        options = {**self.files.image, **self.merged_kwargs["image"]}
        most = positive_int_or(options, "max_patches", 32, MAX_TILES)
        if is_low_detail(options) or not options.get("crop_to_patches", True) or most == 1:
            return FixedSize(tile)
        if options.get("fine_route"):
            raise ConfigError("fine_route in the preprocessor JSON is not supported; set it to false")
        dense = {key: options.get(f"dense_{key}") or 0 for key in ("max_patches", "max_scale", "min_aspect", "max_aspect")}
        return PageTiles(
            tile,
            positive_int_or(options, "min_patches", 1),
            most,
            dense_tiles=dense["max_patches"],
            dense_scale=dense["max_scale"],
            dense_ratios=(dense["min_aspect"], dense["max_aspect"]),
        )

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return rows of tiles, each after its tag; then an empty line and the whole image, if there are several tiles."""
        rows, columns = geometry.tiles if geometry.t > 1 else (1, 1)
        each = geometry.num_embeds // geometry.t
        around, pieces = self.token_or_text("<fake_token_around_image>"), list[Piece]()
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [around, self.token_or_text(f"<row_{row}_col_{column}>"), each]
            if row < rows:
                pieces.append(self.encode("\n"))
        if geometry.t == 1:  # the line's end joins the prompt's text
            span = build_span(pieces, self.placeholder_ids["image"])
            return replace(span, after=self.encode("\n"), merges=self.newline_merges)
        return build_span([*pieces, self.encode("\n\n"), *self.global_image(each)], self.placeholder_ids["image"])

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        """Return options for at most this many tiles, of which the whole image is one."""
        return {"min_patches": 1, "max_patches": max(1, tiles - 1)}
