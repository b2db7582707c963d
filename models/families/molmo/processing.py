"""Input processing of Molmo: a small view of an image, overlapping crops of it, and a mask of their padding.

Source: the publisher's image_preprocessing_molmo.py and preprocessing_molmo.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from ....callers.errors import ConfigError
from ....mm.fields import FieldElem, FlatField
from ....mm.media.policy import DecodeSpec
from ....mm.rules import CAUSAL
from ....mm.tiling.overlapped import PaddedOverlappedTiles
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.base import end_of_word
from ....processors.bases.tiles import height_width, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, read_pixel_spec
from ....processors.options import is_low_detail
from ..molmo2.processing import CropSpec, Molmo2ProcessingInfo

_MAX_CROPS = 12
_VOCABULARY, _ADDED_TOKENS, _HIDDEN_SIZE = 50304, 128, 4096
_TEMPLATE = """
{%- for m in messages -%}
  {%- if m.role not in ('user', 'assistant') -%}{{ raise_exception('this model takes no role ' ~ m.role) }}{%- endif -%}
  {{- ' ' ~ m.role | capitalize ~ ': ' -}}
  {%- if m.content is string -%}{{ m.content }}
  {%- else -%}
    {%- for part in m.content -%}
      {%- if part.type == 'image' -%}{{ '<|image|>' }}
      {%- elif part.type == 'text' -%}{{ part.text }}
      {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ' Assistant:' }}{%- endif -%}"""


class MolmoProcessingInfo(Molmo2ProcessingInfo):
    """ProcessingInfo of Molmo. Beside Molmo2's tensors of an image there is `padding`, see `models.families.molmo`.

    All images of a prompt are before its text, which begins with a space.
    """

    rewrites_prompts = True
    element_format = "point_tags"
    modalities = ("image",)
    prompt_attention = CAUSAL
    placeholders = {"image": ("<|image|>",)}
    valid_kwargs = {"image": ("detail", "max_crops")}
    text_config_defaults = {"vocab_size": _VOCABULARY + _ADDED_TOKENS, "hidden_size": _HIDDEN_SIZE}
    chat_template = _TEMPLATE
    end_tokens = ("<|endoftext|>",)
    default_flags: ClassVar[Mapping[str, bool | None]] = {
        "image_use_col_tokens": True, "use_single_crop_col_tokens": True, "use_single_crop_start_token": False,
        "use_frame_special_tokens": False,
    }  # fmt: skip

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Count the added tokens, which follow all rows of the first table, as part of the vocabulary.

        MolmoE's config.json names the hidden size `d_model`.
        """
        config = {"hidden_size": files.config.get("d_model", _HIDDEN_SIZE), **files.config}
        size = config.get("embedding_size") or config.get("vocab_size", _VOCABULARY)
        size += config.get("additional_vocab_size", _ADDED_TOKENS)
        return replace(files, config={**config, "vocab_size": size})

    def resolve_spec(self, modality: str) -> CropSpec:
        json = self.files.image
        options = {**json, **self.merged_kwargs[modality]}
        patch = positive_int_or(json, "image_patch_size", 14)
        tall, wide = height_width(json.get("base_image_input_size") or 336, "base_image_input_size")
        side, margins = tall // patch, tuple(json.get("overlap_margins") or (4, 4))
        if tall != wide or tall % (2 * patch):
            raise ConfigError(f"base_image_input_size is {tall} x {wide}; it must be a square of n x {2 * patch} pixels")
        if len(margins) != 2 or sum(margins) > 8 or any(margin % 2 for margin in margins):
            raise ConfigError(f"overlap_margins is {margins}; give two even numbers of at most 8 together")
        for key in ("image_token_length_h", "image_token_length_w"):
            if positive_int_or(json, key, side // 2) != side // 2:
                raise ConfigError(f"{key} is {json[key]}; pooling 2 x 2 of {side} patches gives {side // 2}")
        if not json.get("image_padding_mask", True):
            raise ConfigError("image_padding_mask is false; the model needs to know which patches are padding")
        self.check_config("vision_backbone", image_patch_size=patch)
        most = 1 if is_low_detail(options) else positive_int_or(options, "max_crops", _MAX_CROPS, _MAX_CROPS)
        tiling = PaddedOverlappedTiles(patch, side, (margins[0], margins[1]), most)
        spec = CropSpec(
            OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, filter="bilinear", unrounded=True, tiling=tiling, patch=patch, side=side
        )
        return read_pixel_spec(json, spec, {})

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec()

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors that the class describes.

        As published, each view gets the padding of the crop after it, and the last one counts as padded in part.
        """
        kwargs, grid = super().process(item, dtype)
        spec: CropSpec = self.specs["image"]
        assert isinstance(spec.tiling, PaddedOverlappedTiles)
        crops = spec.tiling.padding(item.header.height, item.header.width)
        shifted = np.concatenate([crops, np.full_like(crops[:1], 2)]).reshape(-1)
        return {**kwargs, "padding": FieldElem(torch.from_numpy(shifted), FlatField())}, grid

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Put the first token before the images, these before the text, and a space before that, unless it begins with one."""
        image, count = self.placeholder_ids["image"], items.get("image", 0)
        text = [token for token in ids if token != image]
        if len(ids) - len(text) not in (0, count):
            return super().preprocess_prompt(ids, items)
        text = text[1:] if self.bos is not None and text[:1] == [self.bos] else text
        encode, decode = self.files.encode, self.files.decode
        if text and encode is not None and decode is not None:
            end = end_of_word(text, 0, decode)
            word = decode(text[:end])
            if word and not word[0].isspace():
                text[:end] = encode(f" {word}")
        return [*(() if self.bos is None else (self.bos,)), *(image,) * count, *text]
