"""Input processing of BAGEL: images at native resolution within bounds on both sides, which Pillow resizes.

Source: the publisher's data/transforms.py, modeling/bagel/bagel.py and inferencer.py, with the sizes of its app. The
inferencer resizes every image for the autoencoder first, even if the autoencoder does not read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

from ....callers.errors import ConfigError
from ....mm.rules import PromptAttention, Rule
from ....mm.tiling.whole import BoundedSides, Successive
from ....mm.types import EmbeddingItem, ItemGeometry, MediaHeader
from ....processors.bases.attention_rules import item_ranges
from ....processors.bases.tiles import TiledInfo, TileSpec, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, apply_resample
from ....processors.interface import Span
from ....processors.options import is_low_detail
from ....processors.patches import LOW_DETAIL
from ....processors.spans import build_span
from .rules import one_position

_EDGES = ("longest_edge", "shortest_edge")
_SHORTEST, _MAX_PIXELS = 224, 14 * 14 * 9 * 1024
_AUTOENCODER = BoundedSides(16, 1024, 512, _MAX_PIXELS)
_TEMPLATE = """
{%- if enable_thinking is defined and enable_thinking -%}
{{- '<|im_start|>You should first think about the reasoning process in the mind and then provide the user with the answer. ' }}
{{- '\\nThe reasoning process is enclosed within <think> </think> tags, i.e. <think> reasoning process here </think> ' }}
{{- 'answer here<|im_end|>' }}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.content is string -%}{{ '<|im_start|>' ~ m.content ~ '<|im_end|>' }}
  {%- else -%}
    {%- for part in m.content -%}
      {%- if part.type == 'image' -%}{{ '<|image_pad|>' }}
      {%- elif part.type == 'text' -%}{{ '<|im_start|>' ~ part.text ~ '<|im_end|>' }}
      {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>' }}{%- endif -%}"""
_ONE_POSITION = Rule.of(one_position)


class BagelProcessingInfo(TiledInfo):
    """ProcessingInfo of BAGEL. The tokens of an image, its start and end token included, see each other at one position."""

    rewrites_prompts = True
    modalities = ("image",)
    prompt_attention = PromptAttention("bidirectional_ranges", Rule.of(item_ranges), brackets=2)
    placeholders = {"image": ("image_token_id", "<|image_pad|>")}
    valid_kwargs = {"image": ("detail", "max_pixels", "resample", "size")}
    default_kwargs = {"resample": "pillow"}
    text_config_defaults = {"vocab_size": 151936, "hidden_size": 4096}
    embeds_layout = "grid"
    chat_template = _TEMPLATE
    end_tokens = ("<|im_end|>",)

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        return replace(files, config={**files.config, "text_config": files.config.get("llm_config") or {}})

    def resolve_token_ids(self) -> None:
        token = self.config_token_id
        self.start = token("vision_start_token_id", "<|vision_start|>")
        self.end = token("vision_end_token_id", "<|vision_end|>")

    def resolve_spec(self, modality: str) -> TileSpec:
        options = self.merged_kwargs[modality]
        patch = positive_int_or(self.files.config.get("vit_config") or {}, "patch_size", 14)
        limit = patch * positive_int_or(self.files.config, "vit_max_num_patch_per_side", 70)
        size = options.get("size") or {}
        if not isinstance(size, Mapping) or not size.keys() <= {*_EDGES}:
            raise ConfigError(f"size is {size!r}; give longest_edge, shortest_edge or both, in pixels")
        stored = self.files.image.get("size")  # a square in the file that vLLM needs; the publisher's code does not read it
        size = {**{key: stored[key] for key in _EDGES if isinstance(stored, Mapping) and key in stored}, **size}
        most = min(limit, isqrt(LOW_DETAIL)) if is_low_detail(options) else limit
        longest = positive_int_or(size, "longest_edge", most, limit)
        shortest = positive_int_or(size, "shortest_edge", min(_SHORTEST, longest), longest)
        if longest < patch:
            raise ConfigError(f"longest_edge is {longest}; give at least the {patch} pixels of a patch")
        most = positive_int_or({**self.files.image, **options}, "max_pixels", _MAX_PIXELS)
        spec = TileSpec(
            IMAGENET_STANDARD_MEAN,
            IMAGENET_STANDARD_STD,
            tiling=Successive((_AUTOENCODER, BoundedSides(patch, longest // patch * patch, shortest, most))),
            patch=patch,
        )
        return apply_resample(spec, options)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), positions=_ONE_POSITION)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return replace(super().embeds_geometry(item), positions=_ONE_POSITION)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return build_span([(self.start,), geometry.num_embeds, (self.end,)], self.placeholder_ids[modality])

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Drop the start and the end token around a placeholder, which are part of the item's range."""
        image, out = (self.start, self.placeholder_ids["image"], self.end), list[int]()
        for token in ids:
            out.append(token)
            if tuple(out[-3:]) == image:
                out[-3:] = image[1:2]
        return out

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for a shorter longer side; the other side is counted one patch longer, as it may be rounded up."""
        patch, (short, long) = self.specs[modality].patch, sorted(grid[1:])
        fits = [side for side in range(1, long + 1) if side * min(side, side * short // long + 1) <= rows]
        return {"size": {"longest_edge": fits[-1] * patch, "shortest_edge": 1}} if fits else None
