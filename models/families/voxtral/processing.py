"""Input processing of Voxtral: audio in windows of 30 s as log-mel frames, 12.5 tokens per second.

Source: mistral-common's audio requests: the last window is padded with silence, which also becomes tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....mm.speech import SpeechRequest
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.windows import WindowedAudioInfo
from ....processors.files import ProcessorFiles
from ....processors.mel import MelSpec


class VoxtralProcessingInfo(WindowedAudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Voxtral, in the Hub's layout and in its publisher's."""

    placeholders = {"audio": ("audio_token_id", 24)}
    text_config_defaults = {"hidden_size": 3072, "vocab_size": 131072, "max_position_embeddings": 131072}
    mel_defaults = MelSpec(num_mel_bins=128)
    language_codes = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Return the files with the feature extractor, which the publisher's layout keeps in the config."""
        return replace(files, audio=files.audio or files.config.get("feature_extractor") or {})

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        in_publishers_layout = "feature_extractor" in self.files.config
        return {"audio": ("audio_token_id", "[AUDIO]")} if in_publishers_layout else self.placeholders

    def num_rows(self, frames: int) -> int:
        """Return all rows of the windows that the frames reach into."""
        window = self.mel_spec.window_frames
        return -(-frames // window) * (window // 2 // self.stack_factor)

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the published transcription prompt; without a language the model detects it."""
        prefix = "" if language is None else f"lang:{language}"
        return SpeechRequest(f"[INST][BEGIN_AUDIO][AUDIO][/INST]{prefix}[TRANSCRIBE]")
