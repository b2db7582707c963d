"""What Qwen2-Audio wants to be fed: sounds of up to 30 s as log-mel frames, one token for 40 ms. Knows no model."""

from __future__ import annotations

from .mel import MelSpec
from .sounds import SoundInfo


class Qwen2AudioProcessingInfo(SoundInfo):
    """ProcessingInfo of Qwen2-Audio. One slot token becomes as many as the item has embeddings."""

    slots = {"audio": ("audio_token_index", "audio_token_id", 151646)}
    published = {"hidden_size": 4096, "vocab_size": 151936}
    mel = MelSpec(mels=128)

    def read(self, modality: str) -> MelSpec:
        spec = super().read(modality)
        self.agree("audio_config", max_source_positions=spec.longest // spec.hop // 2)
        return spec

    def num_rows(self, frames: int) -> int:
        """The second convolution halves frames, rounding up; the average of two halves them again, rounding down."""
        return (frames + 1) // 2 // 2

    def num_frames(self, sounding: int) -> int:
        """Two more at most, the start of the silence that fills up the window: the convolutions reach no further."""
        return (sounding + 1) // 2 * 2 + 1
