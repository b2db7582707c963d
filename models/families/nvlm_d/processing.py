"""Input processing of NVLM-D: InternVL's tiles, each after its number as text. Source: vLLM's processors/nvlm_d.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....mm.types import ItemGeometry
from ....processors.bases.base import insert_text_around
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.interface import Span
from ....processors.spans import Piece, build_span
from ..internvl.processing import InternVLChatProcessingInfo, chat_template

_BEFORE, _AFTER = "<Image", "</Image>"  # the rest of <Image> is tokenized together with the name of the first tile


class NvlmDProcessingInfo(TextPlaceholders, InternVLChatProcessingInfo):
    """ProcessingInfo of NVLM-D. Prompts spell an image as <image>."""

    element_format = ""
    placeholders = {"image": ("image_token_id", "<|vision_pad|>")}
    placeholder_texts = {"image": "<image>"}
    inserted = {"image": (_BEFORE, _AFTER)}
    chat_template = chat_template("You are a helpful assistant.", "<image>")

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        ids = super().preprocess_prompt(ids, items)
        if not items.get("image"):
            return ids
        return insert_text_around(ids, self.placeholder_ids["image"], _BEFORE, _AFTER, self.files)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the tiles, of which the last is the whole image."""
        rows, tiles = geometry.num_embeds // geometry.t, geometry.t
        names = [*(f"<tile_{number}>" for number in range(1, tiles)), "<tile_global_thumbnail>"]
        names[0] = ">" + names[0]
        pieces: list[Piece] = []
        for name in names:
            pieces += [self.encode(name), rows]
        return build_span(pieces, self.placeholder_ids["image"])
