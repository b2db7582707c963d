"""What Qwen2-Audio wants to be fed: sounds of up to 30 s as log-mel frames, one token for 40 ms. Knows no model."""

from __future__ import annotations

from ..mm.speech import SpeechRequest
from .mel import MelSpec
from .speech import SpeechInfo


class Qwen2AudioProcessingInfo(SpeechInfo):
    """ProcessingInfo and SupportsTranscription of Qwen2-Audio. One slot token becomes as many as the item has embeddings."""

    slots = {"audio": ("audio_token_index", "audio_token_id", 151646)}
    published = {"hidden_size": 4096, "vocab_size": 151936}
    mel = MelSpec(mels=128)
    codes = ("zh", "en", "yue", "fr", "it", "es", "de", "ja")

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

    def transcription(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """The prompt that the model was trained with (its EVALUATION.md); it has no place for words to expect."""
        told = "" if language is None else f" <|{language}|>"
        return SpeechRequest(f"<|audio_bos|><|AUDIO|><|audio_eos|>Detect the language and recognize the speech:{told}")

    def transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """A model that was not told the language writes its token first."""
        first = answer.strip().removeprefix("<|").partition("|>")[0]
        return super().transcript(answer, language or (first if first in self.codes else None))
