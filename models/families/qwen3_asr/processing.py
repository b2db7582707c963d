"""Input processing of Qwen3-ASR: audio of up to 20 minutes as log-mel frames, 13 tokens per second.

Source: the prompt of the published inference package, qwen_asr: a system turn with the context, the audio, and
"language NAME" before the text if the language is given.
"""

from __future__ import annotations

from dataclasses import replace

from ....mm.languages import LANGUAGES
from ....mm.speech import SpeechRequest, strip_control_tokens
from ....processors.bases.aut import AutInfo
from ....processors.bases.speech import SpeechMixin
from ....processors.files import ProcessorFiles

_TEXT_MARK = "<asr_text>"
_CODES = "ar yue zh cs da nl en fil fi fr de el hi hu id it ja ko mk ms fa pl pt ro ru es sv th tr vi"


class Qwen3ASRProcessingInfo(AutInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Qwen3-ASR."""

    placeholders = {"audio": ("audio_token_id", "audio_token_index", 151676)}
    text_config_defaults = {"hidden_size": 2048, "vocab_size": 151936}
    language_codes = tuple(_CODES.split())
    takes_context = True
    max_seconds = 1200  # as in the published package
    default_min_samples = 8000

    @property
    def closed_samples(self) -> int:  # type: ignore[override]
        window: int = (self.files.config.get("audio_config") or {}).get("n_window_infer", 800)
        return window * self.mel_spec.hop_length

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        return replace(files, config=files.config.get("thinker_config") or files.config)

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        prefix = "" if language is None else f"language {LANGUAGES[language].title()}{_TEXT_MARK}"
        turns = f"system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
        return SpeechRequest(f"<|im_start|>{turns}<|im_start|>assistant\n{prefix}")

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Return text and language. If the prompt has none, "language NAME" precedes the text; NAME is None without speech."""
        head, mark, text = strip_control_tokens(answer).rpartition(_TEXT_MARK)
        name = head.strip().removeprefix("language ").strip().lower()
        detected = next((code for code in self.language_codes if LANGUAGES[code] == name), None) if mark else language
        return text.strip(), detected or language
