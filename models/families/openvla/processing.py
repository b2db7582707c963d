"""Input processing of OpenVLA: a square image with two normalisations, after the prompt's first token.

Source: vLLM's processor for openvla-7b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....callers.errors import ConfigError, short_repr
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import FieldElem, FlatField
from ....mm.parse import MultiModalDataParser
from ....mm.tiling.whole import FixedSize
from ....mm.types import ImageItem, ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.tiles import TiledInfo, TileSpec, height_width
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patchify_crops, read_pixel_spec

_MEANS = ((0.484375, 0.455078125, 0.40625), IMAGENET_STANDARD_MEAN)
_STDS = ((0.228515625, 0.2236328125, 0.224609375), IMAGENET_STANDARD_STD)
_TEMPLATE = """
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}{{ m.content if m.content is string else m.content | map(attribute='text') | join }}
  {%- else -%}
    {{- 'In: ' ~ (m.content if m.content is string else m.content | selectattr('type', 'equalto', 'text')
        | map(attribute='text') | join) ~ '\\nOut:' -}}
  {%- endif -%}
{%- endfor -%}"""


@dataclass(frozen=True)
class TwoMeans(TileSpec):
    """`mean` and `std` are those of DINOv2's pixels, `second_mean` and `second_std` those of SigLIP's."""

    second_mean: tuple[float, ...] = IMAGENET_STANDARD_MEAN
    second_std: tuple[float, ...] = IMAGENET_STANDARD_STD


class OpenVLAProcessingInfo(TiledInfo):
    """ProcessingInfo of OpenVLA. The tensors are those of TiledInfo, and `fused_pixel_values`, normalised for SigLIP."""

    rewrites_prompts = True
    modalities = ("image",)
    placeholders = {"image": ("image_token_index", "image_token_id", 32000)}
    valid_kwargs = {"image": ("resample",)}
    default_kwargs = {"resample": "pillow"}
    chat_template = _TEMPLATE

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities, {"image": 1}, super().parser().embeddings)

    def resolve_token_ids(self) -> None:
        self.first = self.text_config.get("bos_token_id", 1)

    def resolve_spec(self, modality: str) -> TileSpec:
        json = self.files.image
        if json.get("image_resize_strategy", "resize-naive") != "resize-naive":
            reason = "only resize-naive is supported"
            raise ConfigError(f"image_resize_strategy is {short_repr(json['image_resize_strategy'])}; {reason}")
        sides = self.files.config.get("image_sizes") or [224, 224]
        if len({*sides}) != 1:
            raise ConfigError(f"image_sizes in config.json are {list(sides)}; both towers must take the same size")
        means, stds = _pair(json, "means", _MEANS), _pair(json, "stds", _STDS)
        first, second = ({"image_mean": mean, "image_std": std} for mean, std in zip(means, stds, strict=True))
        plain = TwoMeans(tiling=FixedSize(height_width(sides[0], "image_sizes")))
        spec, other = (read_pixel_spec(values, plain, self.merged_kwargs[modality]) for values in (first, second))
        return replace(spec, second_mean=other.mean, second_std=other.std)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors that the class describes."""
        kwargs, grid = super().process(item, dtype)
        assert isinstance(item, ImageItem)
        spec = self.specs["image"]
        second = replace(spec, mean=spec.second_mean, std=spec.second_std)
        patches = patchify_crops(item.pixels[None], self.plan(item.header), second, PatchLayout(spec.patch), dtype)
        return {**kwargs, "fused_pixel_values": FieldElem(patches, FlatField())}, grid

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Put the image after the first token, unless the prompt has a placeholder."""
        image = self.placeholder_ids["image"]
        if not items.get("image") or image in ids:
            return ids
        start = int(list(ids[:1]) == [self.first])
        return [*ids[:start], image, *ids[start:]]

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)


def _pair(json: Mapping[str, Any], key: str, default: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """Return the values of DINOv2's and SigLIP's pixels; ConfigError unless the preprocessor's JSON has both."""
    values = json.get(key) or default
    if not isinstance(values, list | tuple) or len(values) != len(default):
        raise ConfigError(
            f"{key} in the preprocessor JSON is {short_repr(values)}; give three numbers for each of the two towers"
        )
    return values
