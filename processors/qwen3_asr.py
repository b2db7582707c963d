"""What Qwen3-ASR wants to be fed: sounds of up to 20 minutes as log-mel frames, 13 tokens a second. Knows no model.

Source: the prompt of the published inference package, qwen_asr: a system turn with words to expect, the sound, and
"language NAME" before the text where the language is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.speech import LANGUAGES, SpeechRequest, cleaned
from ..mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .files import ProcessorFiles
from .mel import MelSpec, log_mel, read_mel_spec
from .speech import SpeechInfo, sound

_SECONDS = 1200  # that the published package takes at once
_SHORTEST = 8000  # samples; shorter sounds are filled up with silence
_MARK = "<asr_text>"
_CODES = "ar yue zh cs da nl en fil fi fr de el hi hu id it ja ko mk ms fa pl pt ro ru es sv th tr vi"


@dataclass(frozen=True)
class AutMelSpec(MelSpec):
    """`least`: samples that a sound has at least; `chunk`: frames that the encoder convolves alone."""

    least: int = _SHORTEST
    chunk: int = 100

    def rows(self, samples: int) -> int:
        """Three convolutions of stride 2 over each chunk."""
        whole, rest = divmod(max(samples, self.least) // self.hop, self.chunk)
        return whole * -(-self.chunk // 8) + -(-rest // 8)


class Qwen3ASRProcessingInfo(SpeechInfo):
    """ProcessingInfo and SupportsTranscription of Qwen3-ASR. One slot token becomes as many as the item has embeddings."""

    slots = {"audio": ("audio_token_id", "audio_token_index", 151676)}
    published = {"hidden_size": 2048, "vocab_size": 151936}
    codes = tuple(_CODES.split())

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(replace(files, config=files.config.get("thinker_config") or files.config), *options)

    def read(self, modality: str) -> AutMelSpec:
        made = read_mel_spec(self.files.audio, MelSpec(mels=128))
        given, half = self.files.audio, (self.files.config.get("audio_config") or {}).get("n_window", 50)
        self.agree("audio_config", num_mel_bins=made.mels)
        longest, least = _SECONDS * made.rate, given.get("min_length", _SHORTEST)
        return AutMelSpec(made.mels, made.rate, made.window, made.hop, longest, least, 2 * half)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return ItemGeometry(self.specs["audio"].rows(self.samples(header)), 1, 1, linear=True)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[frames, mels]` of the sound alone, and `audio_frames`, their number."""
        spec, samples = self.specs["audio"], sound(item).samples
        features = log_mel(F.pad(samples, (0, max(0, spec.least - len(samples)))), spec)
        frames = FieldElem(torch.tensor(len(features)), BatchedField(keep_on_cpu=True))
        made = {"input_features": FieldElem(features.to(dtype), FlatField()), "audio_frames": frames}
        return made, self.geometry(item.header)

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
