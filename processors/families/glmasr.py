"""What GLM-ASR wants to be fed: sounds in windows of 30 s as log-mel frames, 12.5 tokens a second. Knows no model.

Source: the published processor and chat template.
"""

from __future__ import annotations

from ..mm.speech import SpeechRequest
from .mel import MelSpec
from .windows import WindowedInfo

_SECONDS = 655  # that fill the decoder's context


class GlmAsrProcessingInfo(WindowedInfo):
    """ProcessingInfo and SupportsTranscription of GLM-ASR. One slot token becomes as many as the item has embeddings."""

    slots = {"audio": ("audio_token_id", "audio_token_index", 59260)}
    published = {"hidden_size": 2048, "vocab_size": 59264}
    mel = MelSpec(mels=128)
    codes = ("zh", "en", "yue")
    apart = True

    def most_windows(self, seconds: int, rows: int) -> int:
        return _SECONDS // seconds

    def num_rows(self, frames: int) -> int:
        """Rows of a group that is not full are dropped."""
        return (frames + 1) // 2 // self.joined

    def transcription(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """The one prompt it was trained with, which names no language."""
        slot = "<|begin_of_audio|><|pad|><|end_of_audio|>"
        return SpeechRequest(f"<|user|>\n{slot}<|user|>\nPlease transcribe this audio into text<|assistant|>\n")
