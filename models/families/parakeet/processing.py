"""Input processing of Parakeet: NeMo's log-mel frames, 12.5 rows per second. A prompt is one audio item without text.

Source: the published feature extractor and tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ....callers.errors import InputError
from ....mm.parse import MultiModalDataParser
from ....mm.speech import FrameRule, SpeechRequest
from ....processors.bases.audio import AudioInfo
from ....processors.bases.fastconformer import FastConformerInfo
from ....processors.bases.speech import SpeechMixin


class BlankPrompt(AudioInfo, SpeechMixin):
    """Prompts of CTC and transducer models: one item without text. The blank token is the placeholder of its rows."""

    rewrites_prompts = True
    encoder_defaults: ClassVar[Mapping[str, Any]] = {"hidden_size": 1024}
    adds_special_tokens = takes_language = takes_instruction = False
    language_codes = ("en",)

    @property
    def embed_width(self) -> int:
        return int({**self.encoder_defaults, **(self.files.config.get("encoder_config") or {})}["hidden_size"])

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities, {"audio": 1}, super().parser().embeddings)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Return the placeholder alone. Raise InputError unless the prompt is one item without text."""
        blank = self.placeholder_ids["audio"]
        if list(ids) not in ([], [blank]) or items.get("audio") != 1:
            raise InputError(
                "this model takes one audio item per prompt and no text; give an empty prompt with its audio",
                code="unsupported",
            )
        return [blank]

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        return SpeechRequest("")


class ParakeetProcessingInfo(BlankPrompt, FastConformerInfo):
    """ProcessingInfo and SupportsTranscription of Parakeet with a CTC head."""

    placeholders = {"audio": ("pad_token_id", 1024)}
    text_config_defaults = {"vocab_size": 1025}

    def frame_rule(self) -> FrameRule:
        return FrameRule(self.placeholder_ids["audio"], self.row_seconds)


class ParakeetTransducerProcessingInfo(BlankPrompt, FastConformerInfo):
    """ProcessingInfo and SupportsTranscription of Parakeet with a transducer (TDT, RNN-T)."""

    placeholders = {"audio": ("blank_token_id", 8192)}
    text_config_defaults = {"vocab_size": 8193}

    def resolve_token_ids(self) -> None:
        self.pad_token_id = self.config_token_id("pad_token_id", 2)

    def frame_rule(self) -> FrameRule:
        return FrameRule(self.pad_token_id, self.row_seconds)
