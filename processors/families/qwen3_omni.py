"""What Qwen3-Omni's thinker is fed: pictures and clips at their own size, sounds at 13 rows a second. Knows no model."""

from __future__ import annotations

from .aut import AutInfo
from .patches import PatchSpec
from .pictures import HALF
from .thinker import ThinkerInfo


class _Sounds(AutInfo):
    slots = {"audio": ("audio_token_id", 151646)}
    seconds = 2400  # that the publisher's report speaks of


class Qwen3OmniProcessingInfo(ThinkerInfo):
    """ProcessingInfo of Qwen3-Omni. One slot token becomes as many as the item has embeddings."""

    slots = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656), **_Sounds.slots}
    patches = {
        "image": PatchSpec(HALF, HALF, patch=16),
        "video": PatchSpec(HALF, HALF, patch=16, min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32),
    }
    sounds = _Sounds
    per_second = 25

    @property
    def row_width(self) -> int:
        """The first level, and those that the decoder's first layers add."""
        vision = self.files.config.get("vision_config") or {}
        return super().row_width * (1 + len(vision.get("deepstack_visual_indexes", (8, 16, 24))))
