"""Input processing of Gemma 3: images as squares of one size and, with pan and scan, crops of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError, InputError
from ....mm.embeddings import ROWS
from ....mm.rules import PromptAttention, Rule
from ....mm.tiling.longest import PanAndScan
from ....mm.tiling.whole import FixedSize
from ....mm.types import EmbeddingItem, ItemGeometry, MediaHeader
from ....processors.bases.attention_rules import item_runs
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.interface import Span
from ....processors.options import MAX_TILES, check_value, is_low_detail
from ....processors.spans import Piece, build_span

_SCAN = ("do_pan_and_scan", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate")


class Gemma3ProcessingInfo(TiledInfo):
    """ProcessingInfo of Gemma 3. The rows of a square attend to each other bidirectionally, and causally to everything else."""

    modalities = ("image",)
    prompt_attention = PromptAttention("bidirectional_items", Rule.of(item_runs))
    placeholders = {"image": ("boi_token_index", "boi_token_id", 255999)}
    valid_kwargs = {"image": (*TILE_KWARGS, *_SCAN)}
    text_config_defaults = {"vocab_size": 262208, "hidden_size": 2304}

    def resolve_token_ids(self) -> None:
        self.end = self.config_token_id("eoi_token_index", "eoi_token_id", 256000)
        self.image_token = self.config_token_id("image_token_index", "image_token_id", 262144)

    def resolve_spec(self, modality: str) -> TileSpec:
        json, vision = self.files.image, self.files.config.get("vision_config") or {}
        tile, patch = height_width(json.get("size") or 224), positive_int_or(vision, "patch_size", 16)
        self.check_config("vision_config", image_size=tile[0])
        tokens = positive_int_or(self.files.config, "mm_tokens_per_image", 256)
        side = tile[0] // patch
        self.merge = side // math.isqrt(tokens)  # as the published model computes it; patches that fill no square are left out
        if not self.merge:
            raise ConfigError(f"mm_tokens_per_image is {tokens}; at most {side**2} fit {side} patches per side")
        spec = TileSpec(
            IMAGENET_STANDARD_MEAN,
            IMAGENET_STANDARD_STD,
            filter="bilinear",
            tiling=self._tiling(tile),
            patch=patch,
            merge=1 if side % self.merge else self.merge,
        )
        return read_pixel_spec(json, spec, self.merged_kwargs[modality])

    def _tiling(self, tile: tuple[int, int]) -> FixedSize | PanAndScan:
        options = {**self.files.image, **self.merged_kwargs["image"]}
        if is_low_detail(options) or not options.get("do_pan_and_scan"):
            return FixedSize(tile)
        ratio = options.get(_SCAN[3]) or 1.2
        check_value(_SCAN[3], ratio)
        return PanAndScan(
            tile, positive_int_or(options, _SCAN[2], 256), positive_int_or(options, _SCAN[1], 4, MAX_TILES), ratio
        )

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), merge=self.merge)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Return the grid: one square for the image, and one for each of its crops."""
        spec, rows = self.specs[item.modality], len(item.tensors[ROWS])
        side = spec.tiling.plan(1, 1).views[0].tile_size[0] // spec.patch
        squares, left = divmod(rows, (side // self.merge) ** 2)
        if left or not squares:
            raise InputError(f"{rows} rows are not a multiple of the {(side // self.merge) ** 2} rows of one square")
        return ItemGeometry(squares, side, side, self.merge)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return each square with its start and end token and empty lines around; with crops, also text before each square."""
        start, end = (self.placeholder_ids["image"],), (self.end,)
        rows, crops = geometry.num_embeds // geometry.t, geometry.t - 1
        pieces: list[Piece] = [start, rows, end]
        for crop in range(crops):
            between = " " if crop else " and here are some crops to help you see better "
            pieces += [self.encode(f"\n\n{between}\n\n"), start, rows, end]
        span = build_span(pieces, self.image_token)
        before = self.encode("Here is the original image \n\n" if crops else "\n\n")
        return replace(span, before=before, after=self.encode("\n\n"), merges=self.newline_merges)

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return {"do_pan_and_scan": False}
