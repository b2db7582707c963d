"""Input processing of Qwen2-Audio: audio of up to 30 s as log-mel frames, one token per 40 ms."""

from __future__ import annotations

from ....mm.speech import SpeechRequest
from ....processors.bases.audio import AudioInfo
from ....processors.bases.speech import SpeechMixin
from ....processors.mel import MelSpec


def conv_and_pool_rows(frames: int) -> int:
    """Return the rows of Whisper's encoder with pooling: a convolution of stride 2 rounds up, pooling by 2 rounds down."""
    return (frames + 1) // 2 // 2


class Qwen2AudioProcessingInfo(AudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Qwen2-Audio."""

    placeholders = {"audio": ("audio_token_index", "audio_token_id", 151646)}
    text_config_defaults = {"hidden_size": 4096, "vocab_size": 151936}
    mel_defaults = MelSpec(num_mel_bins=128)
    language_codes = ("zh", "en", "yue", "fr", "it", "es", "de", "ja")

    def resolve_spec(self, modality: str) -> MelSpec:
        spec = super().resolve_spec(modality)
        self.check_config("audio_config", max_source_positions=spec.max_samples // spec.hop_length // 2)
        return spec

    def num_rows(self, frames: int) -> int:
        return conv_and_pool_rows(frames)

    def num_input_frames(self, frames: int) -> int:
        """Return the frames and at most two frames of padding: the convolutions reach no further."""
        return (frames + 1) // 2 * 2 + 1

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the prompt that the model was trained with (its EVALUATION.md)."""
        prefix = "" if language is None else f" <|{language}|>"
        return SpeechRequest(f"<|audio_bos|><|AUDIO|><|audio_eos|>Detect the language and recognize the speech:{prefix}")

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Return text and language. Without a language in the prompt, the answer begins with the language's token."""
        first = answer.strip().removeprefix("<|").partition("|>")[0]
        return super().parse_transcript(answer, language or (first if first in self.language_codes else None))
