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
from ..mm.types import AudioItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .files import ProcessorFiles
from .mel import MelSpec, log_mel
from .speech import SpeechInfo

_SECONDS = 1200  # that the published package takes at once
_SHORTEST = 8000  # samples; shorter sounds are filled up with silence
_MARK = "<asr_text>"
_CODES = "ar yue zh cs da nl en fil fi fr de el hi hu id it ja ko mk ms fa pl pt ro ru es sv th tr vi"


@dataclass(frozen=True)
class AutMelSpec(MelSpec):
    """`least`: samples that a sound has at least; `chunk`: frames that the encoder convolves alone."""

    least: int = _SHORTEST
    chunk: int = 100

    def frames(self, samples: int) -> int:
        """Only whole hops make a frame."""
        return max(samples, self.least) // self.hop


class Qwen3ASRProcessingInfo(SpeechInfo):
    """ProcessingInfo and SupportsTranscription of Qwen3-ASR. One slot token becomes as many as the item has embeddings."""

    slots = {"audio": ("audio_token_id", "audio_token_index", 151676)}
    published = {"hidden_size": 2048, "vocab_size": 151936}
    codes = tuple(_CODES.split())
    mel = MelSpec(mels=128)

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(replace(files, config=files.config.get("thinker_config") or files.config), *options)

    def read(self, modality: str) -> AutMelSpec:
        made, half = super().read(modality), (self.files.config.get("audio_config") or {}).get("n_window", 50)
        least = self.files.audio.get("min_length", _SHORTEST)
        return AutMelSpec(made.mels, made.rate, made.window, made.hop, _SECONDS * made.rate, least, 2 * half)

    def num_rows(self, frames: int) -> int:
        """Three convolutions of stride 2 over each chunk."""
        chunk: int = self.specs["audio"].chunk
        whole, rest = divmod(frames, chunk)
        return whole * -(-chunk // 8) + -(-rest // 8)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), linear=True)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[frames, mels]` of the sound alone, and `audio_frames`, their number."""
        if not isinstance(item, AudioItem):
            raise TypeError(f"a {type(item).__name__} is no sound")
        spec, grid = self.specs["audio"], self.geometry(item.header)
        features = log_mel(F.pad(item.samples, (0, max(0, spec.least - len(item.samples)))), spec)
        frames = FieldElem(torch.tensor(len(features)), BatchedField(keep_on_cpu=True))
        return {"input_features": FieldElem(features.to(dtype), FlatField()), "audio_frames": frames}, grid

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
