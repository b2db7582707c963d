"""What Qwen2.5-Omni's thinker is fed: pictures and clips at their own size, sounds at 25 rows a second. Knows no model."""

from __future__ import annotations

from dataclasses import replace

from ..mm.types import ItemGeometry, MediaHeader
from .mel import MelSpec
from .patches import PatchSpec
from .sounds import SoundInfo
from .thinker import ThinkerInfo


class _Sounds(SoundInfo):
    """Up to five minutes, in windows of two seconds."""

    slots = {"audio": ("audio_token_id", "audio_token_index", 151646)}
    mel = MelSpec(mels=128, longest=4_800_000)

    def num_rows(self, frames: int) -> int:
        """The second convolution halves frames, rounding up; the average of two halves them again, rounding down."""
        return (frames + 1) // 2 // 2

    def num_frames(self, sounding: int) -> int:
        """Silence is not looked at."""
        return sounding


class Qwen25OmniProcessingInfo(ThinkerInfo):
    """ProcessingInfo of Qwen2.5-Omni. One slot token becomes as many as the item has embeddings."""

    slots = {
        "image": ("image_token_id", "image_token_index", 151655),
        "video": ("video_token_id", "video_token_index", 151656),
        **_Sounds.slots,
    }
    patches = {"image": PatchSpec(), "video": PatchSpec(min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28)}
    sounds = _Sounds
    per_second = 25

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Marks around a sound among the rows of its clip share the positions of the clip's own."""
        return replace(super().geometry(header), folded=header.modality == "video")

    @property
    def at_once(self) -> int:
        """Two seconds."""
        return int(self.rate_of_time * self.files.config.get("seconds_per_chunk", 2))
