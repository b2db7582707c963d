"""What Gemma 3 wants to be fed: pictures as squares of one size, long ones in crops too. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..mm.embeddings import ROWS
from ..mm.errors import ConfigError, InputError
from ..mm.tiling import Fixed, PanAndScan
from ..mm.types import EmbeddingItem, ItemGeometry
from .base import build_span
from .files import ProcessorFiles
from .interface import Span
from .pictures import HALF, read_pixels, with_resample
from .tiles import DETAIL, MOST_PIECES, TiledInfo, TileSpec, is_low, number_of, pair

_SOFT = ("image_token_index", "image_token_id")
_SCAN = ("do_pan_and_scan", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate")


class Gemma3ProcessingInfo(TiledInfo):
    """ProcessingInfo of Gemma 3. The rows of a square see one another, those before and behind them only as text does."""

    modalities = ("image",)
    prefill = "item_atomic"
    slots = {"image": ("boi_token_index", "boi_token_id", 255999)}
    known = {"image": (*DETAIL, *_SCAN)}
    published = {"vocab_size": 262208, "hidden_size": 2304}

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(files, *options)
        self.end, self.soft = self.token("eoi_token_index", "eoi_token_id", 256000), self.token(*_SOFT, 262144)

    def read(self, modality: str) -> TileSpec:
        json, vision = self.files.image, self.files.config.get("vision_config") or {}
        tile, patch = pair(json.get("size") or 224), number_of(vision, "patch_size", 16)
        self.agree("vision_config", image_size=tile[0])
        tokens = number_of(self.files.config, "mm_tokens_per_image", 256)
        side, left = divmod(tile[0] // patch, math.isqrt(tokens))
        if left or not side or math.isqrt(tokens) ** 2 != tokens:
            raise ConfigError(f"mm_tokens_per_image {tokens} are no square that {tile[0] // patch} patches a side divide into")
        spec = TileSpec(HALF, HALF, filter="bilinear", tiling=self._tiling(tile), patch=patch, merge=side)
        spec = read_pixels(json, spec)
        for layer in self.layers[modality]:
            spec = with_resample(spec, layer)
        return spec

    def _tiling(self, tile: tuple[int, int]) -> Fixed | PanAndScan:
        options = dict(self.files.image)
        for layer in self.layers["image"]:
            options |= layer
        if is_low(options) or not options.get("do_pan_and_scan"):
            return Fixed(tile)
        ratio = options.get(_SCAN[3]) or 1.2
        if not isinstance(ratio, int | float):
            raise ConfigError(f"{_SCAN[3]} is {ratio!r}; give a number, the longer side over the shorter")
        return PanAndScan(tile, number_of(options, _SCAN[2], 256), number_of(options, _SCAN[1], 4, MOST_PIECES), ratio)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Rows of one square, or of several: of a picture, then of its crops."""
        spec, rows = self.specs[item.modality], len(item.tensors[ROWS])
        side = spec.tiling.plan(1, 1).views[0].piece[0] // spec.patch
        squares, left = divmod(rows, (side // spec.merge) ** 2)
        if left or not squares:
            raise InputError(f"{rows} rows are no whole number of squares of {(side // spec.merge) ** 2}")
        return ItemGeometry(squares, side, side, spec.merge)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Empty lines and marks around each square; where there are crops, words before the whole and before them."""
        start, end = (self.slot_ids["image"],), (self.end,)
        rows, crops = geometry.num_embeds // geometry.t, geometry.t - 1
        pieces: list[tuple[int, ...] | int] = [start, rows, end]
        for crop in range(crops):
            between = " " if crop else " and here are some crops to help you see better "
            pieces += [self.encode(f"\n\n{between}\n\n"), start, rows, end]
        span = build_span(pieces, self.soft)
        before = self.encode("Here is the original image \n\n" if crops else "\n\n")
        return replace(span, before=before, after=self.encode("\n\n"), joins=self.line_joins)

    def fewer(self, pieces: int) -> Mapping[str, Any] | None:
        return {"do_pan_and_scan": False}
