"""Input processing of Kanana-1.5-v: images as Qwen2-VL cuts them, in lines; text is tokenised in parts.

Source: the publisher's processors. vLLM's kanana_v.py leaves out the newlines of an image and tokenises text in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.geometry import ResizePolicy
from ....mm.tiling.plan import CropPlan, Resize, TiledView
from ....mm.types import ImageItem, ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.native import IMAGE_KWARGS, NativeResolutionInfo
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.images import patchify_crops
from ....processors.interface import Span
from ....processors.patches import PatchSpec
from ....processors.spans import Piece, build_span

_IMAGE = "<image>"
_PARTS = re.compile(f"({_IMAGE}|\nAI: |\nHuman: )")  # text between them, and each of them, is tokenised by itself
_INTRODUCTION = """The following is a conversation between a curious human and AI assistant. \
당신은 Kakao에서 개발된 인공지능 언어모델이고 이름은 kanana입니다.
Knowledge Cutoff Date: June30, 2024.
Capabilities and Limitations:
   - I cannot search for external content such as weather, news, or the current date and time.
   - If a URL is provided, I cannot access it directly. \
Insteaed, please copy and provide the relevant content for me to process."""
CHAT_TEMPLATE = (
    f"{{{{ bos_token }}}}{_INTRODUCTION}"
    + """{{ '\\n' }}
{%- for m in messages -%}
  {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}
    {{- {'user': 'Human: ', 'assistant': 'AI: '}.get(m.role, '') -}}
    {%- if part.type == 'image' -%}{{ '<image>' }}
    {%- elif part.type == 'text' -%}{{ part.text }}
    {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
    {%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}
    {%- if not loop.last -%}{{ '\\n' }}{%- endif -%}
  {%- endfor -%}
  {%- if not loop.last -%}{{ '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\nAI: ' }}{%- endif -%}"""
)


@dataclass(frozen=True)
class EnlargedSpec(PatchSpec):
    """A PatchSpec of images whose shorter side is first enlarged to a square of patches."""

    def policy(self, frames: int = 1) -> ResizePolicy:
        return ResizePolicy(self.patch * self.merge, self.min_pixels, self.max_pixels, scale_short_sides=True)

    def steps(self, size: tuple[int, int]) -> tuple[Resize, ...]:
        """Return the step that enlarges an image of `size` (height, width)."""
        least = self.patch * self.merge
        scale = least / min(size)
        return (Resize(*(int(side * scale) for side in size)),) if min(size) < least else ()


class KananaVProcessingInfo(TextPlaceholders, NativeResolutionInfo):
    """ProcessingInfo of Kanana-1.5-v.

    Prompts spell an image as <image>. The token of its rows is the one after the end token, as in vLLM; the published model
    gives them none.
    """

    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    default_kwargs = {"resample": "pillow"}
    placeholder_texts = {"image": _IMAGE}
    text_config_defaults = {"vocab_size": 128256, "hidden_size": 2048, "eos_token_id": 128001}
    patch_specs = {"image": EnlargedSpec(max_pixels=14 * 14 * 4 * 1280)}
    adds_special_tokens = False
    rewrites_prompts = True
    tokenizes_parts = True
    chat_template = CHAT_TEMPLATE

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        eos = self.text_config["eos_token_id"]
        return {"image": ("image_token_id", eos + 1 if isinstance(eos, int) else -1)}

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Tokenise the parts of a prompt by themselves, and replace the text of images by their token."""
        encode, decode, image = self.files.encode, self.files.decode, self.placeholder_ids["image"]
        if encode is None or decode is None:
            return ids
        out = list[int]()
        for is_text, run in groupby(ids, lambda token: token != image and decode([token]) != ""):
            if not is_text:
                out += run
                continue
            for part in _PARTS.split(decode(list(run))):
                out += [image] if part == _IMAGE and items.get("image") else encode(part)
        return out

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        _, height, width = geometry.merged
        newline = self.encode("\n")
        pieces = list[Piece]()
        for _ in range(height):
            pieces += [newline, width]
        return build_span(pieces, self.placeholder_ids["image"])

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `pixel_values` `[patches, 3 * temporal * patch^2]` and `image_grid_thw` `[3]`."""
        assert isinstance(item, ImageItem)
        spec: EnlargedSpec = self.specs["image"]
        grid = self.geometry(item.header)
        enlarged = () if spec.resized else spec.steps(item.header.size)
        view = TiledView((*enlarged, Resize(grid.h * spec.patch, grid.w * spec.patch)))
        layout = PatchLayout(spec.patch, spec.merge, spec.temporal)
        patches = patchify_crops(item.pixels[None], CropPlan((view,)), spec, layout, dtype)
        return {
            "pixel_values": FieldElem(patches, FlatField()),
            "image_grid_thw": FieldElem(torch.tensor([grid.t, grid.h, grid.w]), BatchedField(keep_on_cpu=True)),
        }, grid
