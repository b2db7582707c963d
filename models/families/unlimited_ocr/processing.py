"""Input processing of Unlimited-OCR: that of DeepSeek-OCR with up to 32 tiles. An image that is not cut has the whole side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..deepseek_ocr2.processing import V1, DeepseekOcr2ProcessingInfo


class UnlimitedOcrProcessingInfo(DeepseekOcr2ProcessingInfo):
    """ProcessingInfo of Unlimited-OCR."""

    row_layout = replace(V1, max_tiles=32, shrinks_uncut=False)
    ocr_prompts = ("unlimited-parsing",)
    chat_template = DeepseekOcr2ProcessingInfo.chat_template.replace("<image>\\n", "<image>")

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer tiles, or for only the whole image; None if this is too large."""
        layout = self.row_layout
        whole, tile = (side * (side + layout.newlines) for side in (layout.whole_side, layout.tile_side))
        if rows < 1 + whole:
            return None
        tiles = (rows - 1 - whole) // tile
        return {"detail": "low"} if tiles < 2 else {"min_patches": 1, "max_patches": tiles}
