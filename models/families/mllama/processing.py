"""Input processing of Mllama: an image in tiles of the best canvas, which the decoder cross-attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.parse import MultiModalDataParser
from ....mm.rules import Rule
from ....mm.tiling.canvas import CanvasTiles
from ....mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patchify_crops, read_pixel_spec
from ....processors.interface import Span
from ....processors.options import is_low_detail
from ....processors.spans import build_span
from .rules import rows_of_tiles

_IMAGE = "<|image|>"
SPECIAL_TOKENS = 8
"""Tokens beyond `vocab_size` of config.json, of which one stands for an image."""


class MllamaProcessingInfo(TiledInfo):
    """ProcessingInfo of Mllama. The tensors are `pixel_values` `[patches, 3 * patch^2]` and `tiles`: their rows and columns."""

    modalities = ("image",)
    valid_kwargs = {"image": (*TILE_KWARGS, "max_image_tiles")}
    text_config_defaults = {"vocab_size": 128256 + SPECIAL_TOKENS, "hidden_size": 4096}
    embeds_layout = None

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Count the special tokens as part of the vocabulary."""
        text = files.config.get("text_config") or {}
        size = text.get("vocab_size", 128256) + SPECIAL_TOKENS
        return replace(files, config={**files.config, "text_config": {**text, "vocab_size": size}})

    def resolve_token_ids(self) -> None:
        self.cross_token = self.config_token_id("image_token_index", "image_token_id", 128256)

    def resolve_spec(self, modality: str) -> TileSpec:
        json, vision = {**self.files.image, **self.merged_kwargs[modality]}, self.files.config.get("vision_config") or {}
        sides, self.max_tiles = height_width(json.get("size") or 224), vision.get("max_num_tiles", 4)
        if {*sides} != {vision.get("image_size", sides[0])}:
            raise ConfigError(f"tiles of {sides} pixels do not fit image_size in vision_config; download the checkpoint again")
        most = 1 if is_low_detail(json) else positive_int_or(json, "max_image_tiles", self.max_tiles, self.max_tiles)
        spec = TileSpec(
            IMAGENET_STANDARD_MEAN,
            IMAGENET_STANDARD_STD,
            filter="bilinear",
            tiling=CanvasTiles(sides[0], most, thumbnail=False, by_ratio=False),
            patch=vision.get("patch_size", 14),
        )
        return read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return a row per patch and one per tile, of all tiles. Those of padding tiles come last."""
        plan, spec = self.plan(header), self.specs["image"]
        rows = (plan.views[0].tile_size[0] // spec.patch) ** 2 + 1
        padding = (self.max_tiles - plan.num_tiles) * rows
        return ItemGeometry(self.max_tiles, 1, rows, tiles=plan.tiles, visible=Rule.of(rows_of_tiles, padding))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        if not isinstance(item, ImageItem):
            raise TypeError(f"a {type(item).__name__} is not an image")
        spec, plan = self.specs["image"], self.plan(item.header)
        kwargs = {
            "pixel_values": FieldElem(
                patchify_crops(item.pixels[None], plan, spec, PatchLayout(spec.patch), dtype), FlatField()
            ),
            "tiles": FieldElem(torch.tensor(plan.tiles), BatchedField(keep_on_cpu=True)),
        }
        return kwargs, self.geometry(item.header)

    def preprocess_text(self, text: str, bos: str | None) -> str:
        """Put the first token, if the text lacks it, after the images that the text begins with."""
        if not bos or bos in text:
            return text
        rest = text
        while rest.startswith(_IMAGE):
            rest = rest.removeprefix(_IMAGE)
        return f"{text[: len(text) - len(rest)]}{bos}{rest}"

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return an empty span: its token stays in the prompt."""
        return build_span([], 0)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None
