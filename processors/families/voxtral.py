"""What Voxtral wants to be fed: sounds in windows of 30 s as log-mel frames, 12.5 tokens a second. Knows no model.

Source: mistral-common's audio requests: silence fills up the last window, and has tokens like all else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..mm.speech import SpeechRequest
from .files import ProcessorFiles
from .mel import MelSpec
from .windows import WindowedInfo


class VoxtralProcessingInfo(WindowedInfo):
    """ProcessingInfo and SupportsTranscription of Voxtral. One slot token becomes as many as the item has embeddings."""

    slots = {"audio": ("audio_token_id", 24)}
    published = {"hidden_size": 3072, "vocab_size": 131072, "max_position_embeddings": 131072}
    mel = MelSpec(mels=128)
    codes = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")

    def num_rows(self, frames: int) -> int:
        """Of whole windows."""
        window = self.window.piece // self.window.hop
        return -(-frames // window) * (window // 2 // self.joined)

    def transcription(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """The format of instruct transcriptions; a language that is not told is found out."""
        told = "" if language is None else f"lang:{language}"
        return SpeechRequest(f"[INST][BEGIN_AUDIO][AUDIO][/INST]{told}[TRANSCRIBE]")


class VoxtralFormatProcessingInfo(VoxtralProcessingInfo):
    """ProcessingInfo of Voxtral in its publisher's own layout, whose config holds what the Hub has in a file for sounds."""

    slots = {"audio": ("audio_token_id", "[AUDIO]")}

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(replace(files, audio=files.audio or files.config["feature_extractor"]), *options)
