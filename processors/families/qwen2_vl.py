"""What Qwen2-VL and Qwen2.5-VL want to be fed: pictures and clips at their own size, as flat patches. Knows no model."""

from __future__ import annotations

from .native import NativeInfo
from .patches import PatchSpec


class Qwen2VLProcessingInfo(NativeInfo):
    """ProcessingInfo of Qwen2-VL. One slot token becomes as many as the item has embeddings."""

    slots = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656)}
    patches = {"image": PatchSpec(), "video": PatchSpec(min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768)}


class Qwen25VLProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of Qwen2.5-VL: a clip's temporal positions follow its seconds."""

    def time_step(self, fps: float) -> float:
        """`tokens_per_second` times the seconds that one temporal patch covers."""
        per_second = (self.files.config.get("vision_config") or {}).get("tokens_per_second", 4)
        return float(per_second * self.specs["video"].temporal / fps)
