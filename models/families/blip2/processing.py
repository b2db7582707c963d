"""Input processing of BLIP-2: images as squares of one size, all of them before the text and its BOS token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....mm.tiling.whole import FixedSize
from ....processors.bases.tiles import ResampledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import read_pixel_spec

_TEMPLATE = """\
{%- for m in messages if m.content is not string -%}
  {%- for part in m.content if part.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- endfor -%}
{%- for m in messages -%}
  {{- ('' if loop.first else ' ') ~ ('Answer: ' if m.role == 'assistant' else 'Question: ') -}}
  {%- if m.content is string -%}{{ m.content }}{%- else -%}
    {%- for part in m.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ' Answer:' }}{%- endif -%}"""
"""The form of questions in arXiv 2301.12597; checkpoints have no template."""


class Blip2ProcessingInfo(ResampledInfo):
    """ProcessingInfo of BLIP-2."""

    rewrites_prompts = True
    modalities = ("image",)
    chat_template = _TEMPLATE
    placeholders = {"image": ("image_token_index", "image_token_id", "<image>")}
    valid_kwargs = {"image": ("resample",)}
    text_config_defaults = {"vocab_size": 50272, "hidden_size": 768}

    @property
    def latents(self) -> int:
        return positive_int_or(self.files.config, "num_query_tokens", 32)

    def resolve_spec(self, modality: str) -> TileSpec:
        vision = self.files.config.get("vision_config") or {}
        tile = height_width(self.files.image.get("size") or 384)
        self.check_config("vision_config", image_size=tile[0])
        spec = TileSpec(tiling=FixedSize(tile), patch=positive_int_or(vision, "patch_size", 14))
        return read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Put a placeholder per image before the prompt. Those that follow the prompt's first token are moved before it."""
        placeholder, prompt = self.placeholder_ids["image"], list(ids)
        if placeholder not in prompt:
            return [placeholder] * items.get("image", 0) + prompt
        if prompt.index(placeholder) != 1:
            return prompt
        end = next((i for i, token in enumerate(prompt) if i > 0 and token != placeholder), len(prompt))
        return [*prompt[1:end], prompt[0], *prompt[end:]]
