"""Input processing of Qwen2-VL and Qwen2.5-VL: images and videos at native resolution, as flat patches."""

from __future__ import annotations

from collections.abc import Sequence

from ....processors.bases.native import NativeResolutionInfo
from ....processors.patches import PatchSpec


class Qwen2VLProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of Qwen2-VL."""

    element_format = "box_tokens"
    ocr_prompts: Sequence[str] = ("mineru-formula", "mineru-layout", "mineru-table", "mineru-text", "olmocr")
    can_keep_sizes = True
    placeholders = {
        "image": ("image_token_id", "image_token_index", 151655),
        "video": ("video_token_id", "video_token_index", 151656),
    }
    patch_specs = {"image": PatchSpec(), "video": PatchSpec(min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768)}


class Qwen25VLProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of Qwen2.5-VL: the temporal positions of a video follow its seconds."""

    element_format = "resized_json"
    ocr_prompts = ("dolphin-code", "dolphin-formula", "dolphin-layout", "dolphin-table", "dolphin-text", "olmocr")

    def time_step(self, fps: float) -> float:
        """Return `tokens_per_second` times the seconds that one temporal patch covers."""
        return float(self.tokens_per_second(4) * self.specs["video"].temporal / fps)
