"""What Whisper wants to be fed: one sound of up to 30 s as the log-mel frames of a whole window. Knows no model.

Source: arXiv 2212.04356, section 2.3: the prompt is start, language, task, and whether times are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..mm.embeddings import ROWS
from ..mm.errors import ConfigError, InputError
from ..mm.fields import FieldElem, FlatField
from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.types import AudioItem, EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .base import FamilyInfo
from .interface import Span, SpeechRequest, TimestampRule
from .mel import MelSpec, log_mel, read_mel_spec
from .speech import LANGUAGES, cleaned

_START = "<|startoftranscript|>"
_STEP = 0.02  # seconds from one timestamp to the next


class WhisperProcessingInfo(FamilyInfo):
    """ProcessingInfo and SupportsTranscription of Whisper. A sound has no slot: the decoder reads it across."""

    modalities = ("audio",)
    known = {"audio": ()}
    published = {"d_model": 1280, "max_source_positions": 1500}

    def read(self, modality: str) -> MelSpec:
        """Half of the frames of a window are encoder rows."""
        spec = read_mel_spec(self.files.audio, MelSpec())
        for key, have in (("num_mel_bins", spec.mels), ("max_source_positions", spec.longest // spec.hop // 2)):
            if self.files.config.get(key, have) != have:
                said = f"{key} is {self.files.config[key]} in config.json"
                raise ConfigError(f"{said}, but the feature extractor's JSON makes {have}, or is missing and means it")
        return spec

    def decoding(self) -> DecodeSpec:
        return DecodeSpec(rate=self.specs["audio"].rate)

    @property
    def row_width(self) -> int:
        return int(self.text["d_model"])

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities, {"audio": 1}, super().parser().embeddings)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """A whole window, however short the sound; InputError for one that is longer."""
        spec = self.specs["audio"]
        spec.check(header.samples if header.exact else min(header.samples, spec.longest), 1)
        return ItemGeometry(spec.longest // spec.hop // 2, 1, 1)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        spec, rows = self.specs["audio"], len(item.tensors[ROWS])
        if rows != spec.longest // spec.hop // 2:
            raise InputError(f"it holds {rows} rows, a window has {spec.longest // spec.hop // 2}")
        return ItemGeometry(rows, 1, 1)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[frames, mels]` of a whole window: the encoder sees the silence after the sound."""
        if not isinstance(item, AudioItem):
            raise TypeError(f"a {type(item).__name__} is no sound")
        spec, grid = self.specs["audio"], self.geometry(item.header)
        features = log_mel(item.samples, spec, spec.longest)
        return {"input_features": FieldElem(features.to(dtype), FlatField())}, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """None of the prompt's tokens are the sound's."""
        return Span(())

    @property
    def languages(self) -> Mapping[str, str]:
        """Those that the prompt can name; an English-only model has one and is not told."""
        tokens = self.files.generation.get("lang_to_id") or map("<|{}|>".format, LANGUAGES)
        codes = [token.strip("<|>") for token in tokens] if self._multilingual else ["en"]
        return {code: LANGUAGES.get(code, code) for code in codes}

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("transcribe", "translate") if self._multilingual else ("transcribe",)

    @property
    def longest_seconds(self) -> float:
        return float(self.specs["audio"].longest / self.specs["audio"].rate)

    @property
    def has_timestamps(self) -> bool:
        return "no_timestamps_token_id" in self.files.generation

    def detection(self) -> SpeechRequest | None:
        if not self._multilingual:
            return None
        return SpeechRequest(_START, only=tuple(f"<|{code}|>" for code in self.languages))

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
        return cleaned(answer).strip(), language or (None if self._multilingual else "en")

    def _times(self) -> TimestampRule:
        given = self.files.generation
        none = given["no_timestamps_token_id"]
        latest = given.get("max_initial_timestamp_index")
        return TimestampRule(none + 1, none, given["eos_token_id"], _STEP, latest)

    @property
    def _multilingual(self) -> bool:
        given = self.files.generation
        return bool(given.get("is_multilingual", "lang_to_id" in given))
