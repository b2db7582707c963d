"""Input processing of GLM-ASR: audio in windows of 30 s as log-mel frames, 12.5 tokens per second.

Source: the published processor and chat template.
"""

from __future__ import annotations

from ....mm.speech import SpeechRequest
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.windows import WindowedAudioInfo
from ....processors.mel import MelSpec

_MAX_SECONDS = 655  # fills the decoder's context


class GlmAsrProcessingInfo(WindowedAudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of GLM-ASR."""

    placeholders = {"audio": ("audio_token_id", "audio_token_index", 59260)}
    text_config_defaults = {"hidden_size": 2048, "vocab_size": 59264}
    mel_defaults = MelSpec(num_mel_bins=128)
    language_codes = ("zh", "en", "yue")
    takes_language = False
    clip_per_window = True

    def max_windows(self, seconds: int, rows: int) -> int:
        return _MAX_SECONDS // seconds

    def num_rows(self, frames: int) -> int:
        """Return the rows; an incomplete stack is dropped."""
        return (frames + 1) // 2 // self.stack_factor

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the one prompt that the model was trained with; it names no language."""
        audio = "<|begin_of_audio|><|pad|><|end_of_audio|>"
        return SpeechRequest(f"<|user|>\n{audio}<|user|>\nPlease transcribe this audio into text<|assistant|>\n")
