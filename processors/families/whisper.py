"""What Whisper wants to be fed: one sound of up to 30 s as the log-mel frames of a whole window. Knows no model.

Source: arXiv 2212.04356, section 2.3: the prompt is start, language, task, and whether times are wanted.
"""

from __future__ import annotations

from ..mm.errors import ConfigError
from ..mm.parse import MultiModalDataParser
from ..mm.speech import LANGUAGES, SpeechRequest, TimestampRule
from ..mm.types import ItemGeometry
from .interface import Span
from .mel import MelSpec
from .speech import SpeechInfo

_START = "<|startoftranscript|>"
_STEP = 0.02  # seconds from one timestamp to the next


class WhisperProcessingInfo(SpeechInfo):
    """ProcessingInfo and SupportsTranscription of Whisper. A sound has no slot: the decoder reads it across."""

    published = {"d_model": 1280, "max_source_positions": 1500}

    def read(self, modality: str) -> MelSpec:
        spec = super().read(modality)
        for key, have in (("num_mel_bins", spec.mels), ("max_source_positions", spec.longest // spec.hop // 2)):
            if self.files.config.get(key, have) != have:
                raise self.files.contradict(f"{key} is {self.files.config[key]} in config.json", have)
        return spec

    def num_rows(self, frames: int) -> int:
        """Half of the frames of a whole window, however short the sound: the encoder sees the silence after it."""
        return self.window.longest // self.window.hop // 2

    @property
    def row_width(self) -> int:
        return int(self.text["d_model"])

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities, {"audio": 1}, super().parser().embeddings)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """None of the prompt's tokens are the sound's."""
        return Span(())

    @property
    def codes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those that the vocabulary has a token for; an English-only model is not told."""
        if not self._multilingual:
            return ("en",)
        tokens = self.files.generation.get("lang_to_id") or map("<|{}|>".format, LANGUAGES)
        find = self.files.special
        return tuple(token.strip("<|>") for token in tokens if find is None or find(token) is not None)

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("transcribe", "translate") if self._multilingual else ("transcribe",)

    @property
    def has_timestamps(self) -> bool:  # type: ignore[override]
        return "no_timestamps_token_id" in self.files.generation

    def detection(self) -> SpeechRequest | None:
        if not self._multilingual:
            return None
        if not self.codes:
            reason = "the tokenizer has no token of a language, such as <|en|>, but generation_config.json is of a multilingual"
            raise ConfigError(f"{reason} model; use the tokenizer's files of this checkpoint")
        return SpeechRequest(_START, only={f"<|{code}|>": code for code in self.codes})

    def transcription(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        before = f"<|startofprev|> {context.strip()}" if context.strip() else ""
        told = f"<|{language}|><|{task}|>" if self._multilingual else ""
        given = self.files.generation
        return SpeechRequest(
            f"{before}{_START}{told}" + ("" if timestamps else "<|notimestamps|>"),
            suppressed=tuple(given.get("suppress_tokens") or ()),
            suppressed_first=tuple(given.get("begin_suppress_tokens") or ()),
            times=self._times() if timestamps else None,
        )

    def transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return super().transcript(answer, language or "en")

    def _times(self) -> TimestampRule:
        given = self.files.generation
        none = given["no_timestamps_token_id"]
        latest = given.get("max_initial_timestamp_index")
        return TimestampRule(none + 1, none, given["eos_token_id"], _STEP, latest)

    @property
    def _multilingual(self) -> bool:
        given = self.files.generation
        return bool(given.get("is_multilingual", "lang_to_id" in given))
