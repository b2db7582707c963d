"""Input processing of Nemotron-Parse: a page in the middle of a white image of one size. It takes no tokens of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import FieldElem, FlatField
from ....mm.parse import MultiModalDataParser
from ....mm.tiling.whole import PaddedPage
from ....mm.types import ImageItem, ItemGeometry, ItemPlan, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.tiles import TiledInfo, TileSpec, height_width
from ....processors.files import ProcessorFiles
from ....processors.images import patchify_crops
from ....processors.interface import Span
from ....processors.spans import build_span

JOINED = 4  # rows of adjacent patches that the encoder joins to one
_PAGE = (2048, 1648)  # pixels, as in version 1.1


class NemotronParseProcessingInfo(TiledInfo):
    """ProcessingInfo of Nemotron-Parse. The tensor is `pixel_values` `[patches, 3 * patch^2]`, row by row.

    Prompts name what the model writes: `</s><s><predict_bbox><predict_classes><output_markdown>`.
    """

    rewrites_prompts = True
    modalities = ("image",)
    valid_kwargs = {"image": ()}
    text_config_defaults = {"vocab_size": 50265, "hidden_size": 1024}
    embeds_layout = None
    element_format = "xy_tokens"
    adds_special_tokens = False

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        decoder = dict(files.config.get("decoder") or {})
        text = {**decoder, "hidden_size": decoder.get("d_model", 1024)}
        return replace(files, config={**files.config, "text_config": text})

    def resolve_spec(self, modality: str) -> TileSpec:
        """Return the spec. `do_normalize` is not read: it is false, because the published encoder normalises pixels itself."""
        config = self.files.config
        page = height_width(config.get("image_size") or self.files.image.get("final_size") or _PAGE, "image_size")
        patch = (config.get("encoder") or {}).get("patch_size", 16)
        return TileSpec(filter="bilinear", resample="opencv", tiling=PaddedPage(page), patch=patch)

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities, {"image": 1})

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return a row per four adjacent patches, and one for the whole page."""
        spec = self.specs["image"]
        tall, wide = (side // spec.patch for side in self.plan(header).views[0].tile_size)
        return ItemGeometry(1, tall, wide // JOINED, extra=1)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        assert isinstance(item, ImageItem)
        spec, plan = self.specs["image"], self.plan(item.header)
        patches = patchify_crops(item.pixels[None], plan, spec, PatchLayout(spec.patch), dtype)
        return {"pixel_values": FieldElem(patches, FlatField())}, self.geometry(item.header)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Begin the prompt with the decoder's first token, as generation does in transformers."""
        config = self.files.config
        tokens = (part.get("decoder_start_token_id") for part in (config, config.get("decoder") or {}))
        start = next((token for token in tokens if token is not None), 2)
        return ids if ids and ids[0] == start else [start, *ids]

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return an empty span: an image takes no tokens of the prompt."""
        return build_span([], 0)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None

    def resized(self, plan: ItemPlan) -> tuple[int, int]:
        size: tuple[int, int] = self.specs["image"].tiling.size
        return size
