"""What Qwen3-ASR wants to be fed: sounds of up to 20 minutes as log-mel frames, 13 tokens a second. Knows no model.

Source: the prompt of the published inference package, qwen_asr: a system turn with words to expect, the sound, and
"language NAME" before the text where the language is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..mm.speech import LANGUAGES, SpeechRequest, cleaned
from .aut import AutInfo
from .files import ProcessorFiles
from .speech import SpeechInfo

_MARK = "<asr_text>"
_CODES = "ar yue zh cs da nl en fil fi fr de el hi hu id it ja ko mk ms fa pl pt ro ru es sv th tr vi"


class Qwen3ASRProcessingInfo(AutInfo, SpeechInfo):
    """ProcessingInfo and SupportsTranscription of Qwen3-ASR. One slot token becomes as many as the item has embeddings."""

    slots = {"audio": ("audio_token_id", "audio_token_index", 151676)}
    published = {"hidden_size": 2048, "vocab_size": 151936}
    codes = tuple(_CODES.split())
    seconds = 1200  # that the published package takes at once
    shortest = 8000

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(replace(files, config=files.config.get("thinker_config") or files.config), *options)

    def transcription(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        told = "" if language is None else f"language {LANGUAGES[language].title()}{_MARK}"
        turns = f"system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
        return SpeechRequest(f"<|im_start|>{turns}<|im_start|>assistant\n{told}")

    def transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """ "language NAME" comes before the text where the model was not told; NAME is None where nothing is said."""
        head, mark, text = cleaned(answer).rpartition(_MARK)
        name = head.strip().removeprefix("language ").strip().lower()
        spoken = next((code for code in self.codes if LANGUAGES[code] == name), None) if mark else language
        return text.strip(), spoken or language
