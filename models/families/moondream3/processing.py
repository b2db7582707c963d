"""Input processing of Moondream 3: a small view of an image and overlapping crops of it, before the text.

Source: vLLM's processor, which follows the publisher's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ....callers.errors import InputError
from ....kernels.pixels.layout import PatchLayout
from ....mm.embeddings import ROWS
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.parse import MultiModalDataParser
from ....mm.rules import PromptAttention, Rule
from ....mm.tiling.overlapped import OverlappedTiles
from ....mm.tiling.plan import Size
from ....mm.types import EmbeddingItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.attention_rules import item_ranges
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.bases.tiles import TiledInfo, TileSpec, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patchify_crops
from ....processors.interface import Span
from ....processors.options import is_low_detail
from ....processors.spans import build_span
from .config import hub_config

_IMAGE = "<image>"
_TEMPLATE = """
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}{{ m.content if m.content is string else m.content | map(attribute='text') | join }}
  {%- elif m.role != 'user' -%}{{ raise_exception('this model takes no message of role ' ~ m.role) }}
  {%- elif m.content is string -%}{{ '<|md_reserved_0|>query<|md_reserved_1|>' ~ m.content ~ '<|md_reserved_2|>' }}
  {%- else -%}
    {%- for part in m.content if part.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
    {{- '<|md_reserved_0|>query<|md_reserved_1|>' -}}
    {%- for part in m.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
    {{- '<|md_reserved_2|>' -}}
  {%- endif -%}
{%- endfor -%}"""


@dataclass(frozen=True)
class MoondreamTiles(OverlappedTiles):
    """OverlappedTiles whose grid covers the image, or has nearly its aspect ratio if that needs more than `max_tiles`."""

    max_tiles: int = 12

    def arrangement(self, height: int, width: int) -> Size:
        margin, size, most = sum(self.margins) * self.patch, self.step * self.patch, self.max_tiles
        height, width = height - margin, width - margin
        if height <= size or width <= size:
            return 1, 1
        rows, columns = -(-height // size), -(-width // size)
        if rows * columns > most:
            ratio = math.sqrt(most / (rows * columns))
            return max(1, math.floor(rows * ratio)), max(1, math.floor(columns * ratio))
        rows = max(rows, math.floor(math.sqrt(most * height / width)))
        columns = max(columns, math.floor(math.sqrt(most * width / height)))
        if rows * columns > most:
            rows, columns = (rows, most // rows) if columns > rows else (most // columns, columns)
        return max(1, rows), max(1, columns)


class Moondream3ProcessingInfo(TextPlaceholders, TiledInfo):
    """ProcessingInfo of Moondream 3. The first token and the image see each other.

    The tensors are `pixel_values` `[patches, 3 * patch^2]`, the small view first, and `grid`: rows and columns of crops.
    """

    rewrites_prompts = True
    plain_tokens = (_IMAGE,)
    modalities = ("image",)
    prompt_attention = PromptAttention("bidirectional_image_and_first_token", Rule.of(item_ranges), brackets=1)
    placeholder_texts = {"image": _IMAGE}
    valid_kwargs = {"image": ("detail", "max_crops")}
    text_config_defaults = {"vocab_size": 51200, "hidden_size": 2048}
    chat_template = _TEMPLATE
    end_tokens = ("<|endoftext|>",)

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        return replace(files, config=hub_config(files.config))

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        """Return the tokenizer's own token, or else that of coordinates, which texts do not contain."""
        token = None if self.files.token_to_id is None else self.files.token_to_id(_IMAGE)
        return {"image": (self.files.config["tokenizer"]["coord_id"] if token is None else token,)}

    def resolve_token_ids(self) -> None:
        self.first = self.config_token_id(self.files.config["tokenizer"]["bos_id"])

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities, {"image": 1}, super().parser().embeddings)

    def resolve_spec(self, modality: str) -> TileSpec:
        vision, options = self.files.config["vision"], self.merged_kwargs[modality]
        patch, side, margin = vision["enc_patch_size"], vision["enc_n_layers"], vision["overlap_margin"]
        limit = positive_int_or(vision, "max_crops", 12)
        most = 1 if is_low_detail(options) else positive_int_or(options, "max_crops", limit, limit)
        tiling = MoondreamTiles(patch, side, (margin, margin), most)
        return TileSpec(
            IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="lanczos", resample="pillow", tiling=tiling, patch=patch
        )

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return a grid of the rows of the small view, whatever the size of the image."""
        side = self.files.config["vision"]["enc_n_layers"]
        return ItemGeometry(1, side, side, tiles=self.plan(header).tiles)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        side = self.files.config["vision"]["enc_n_layers"]
        rows = len(item.tensors[ROWS])
        if rows != side**2:
            raise InputError(f"it holds {rows} rows, an image of this model has {side**2}")
        return ItemGeometry(1, side, side)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors that the class describes."""
        assert isinstance(item, ImageItem)
        grid, spec = self.geometry(item.header), self.specs["image"]
        patches = patchify_crops(item.pixels[None], self.plan(item.header), spec, PatchLayout(spec.patch), dtype)
        kwargs = {
            "pixel_values": FieldElem(patches, FlatField()),
            "grid": FieldElem(torch.tensor(grid.tiles), BatchedField(keep_on_cpu=True)),
        }
        return kwargs, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return build_span([(self.first,), geometry.num_embeds], self.placeholder_ids[modality])

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Put the image first, whose span begins with the first token, or that token before a prompt without an image."""
        image = self.placeholder_ids["image"]
        ids = list(super().preprocess_prompt(ids, items))
        if not items.get("image"):
            return ids if ids[:1] == [self.first] else [self.first, *ids]
        count = ids.count(image)
        text = [token for token in ids if token != image] if count == 1 else ids
        text = text[1:] if text[:1] == [self.first] else text
        return [image, *text] if count < 2 else text

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)
