"""Input processing of Gemma 3n: audio of up to 30 s, which always has the same number of rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...mm.errors import InputError
from ...mm.speech import LANGUAGES, SpeechRequest
from ...mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..bases.audio import AudioInfo, audio_kwargs, audio_samples
from ..bases.speech import SpeechMixin
from ..bases.tiles import positive_int_or
from ..interface import Span
from ..spans import build_span
from ..usm_mel import UsmMelSpec, read_usm_mel_spec, usm_log_mel

MEL = UsmMelSpec(
    n_fft=1024, win_length=512, low=125.0, high=7600.0, floor=1e-5, adds_floor=False, preemphasis=0.97, multiple=128
)


class Gemma3nProcessingInfo(AudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Gemma 3n."""

    placeholders = {"audio": ("audio_token_id", 262273)}
    text_config_defaults = {"vocab_size": 262400, "hidden_size": 2048}
    language_codes = tuple(LANGUAGES)
    tasks = ("transcribe", "translate")

    def resolve_token_ids(self) -> None:
        self.edges = self.config_token_id("boa_token_id", 256000), self.config_token_id("eoa_token_id", 262272)
        self.rows = positive_int_or(self.files.config, "audio_soft_tokens_per_image", 188)

    def resolve_spec(self, modality: str) -> UsmMelSpec:
        return read_usm_mel_spec(self.files.audio, MEL)

    def num_rows(self, frames: int) -> int:
        return self.rows

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid, spec = super().geometry(header), self.specs["audio"]
        if header.exact and not spec.num_whole_frames(header.samples):
            least = next(samples for samples in range(spec.max_samples) if spec.num_whole_frames(samples))
            raise InputError(f"its {header.samples} samples are too few for one frame; give at least {least}")
        return grid

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        features = usm_log_mel(audio_samples(item), self.specs["audio"])
        return audio_kwargs(features, len(features), dtype), self.geometry(item.header)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows between a start and an end token, with empty lines around."""
        start, end = self.edges
        span = build_span([(start,), geometry.num_embeds, (end,)], self.placeholder_ids["audio"])
        return replace(span, before=self.encode("\n\n"), after=self.encode("\n\n"), merges=self.newline_merges)

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the prompt that vLLM transcribes with; the publisher's examples are like it."""
        name = None if language is None else LANGUAGES[language].title()
        spoken = "" if name is None else f" {'from' if task == 'translate' else 'into'} {name}"
        ask = f"{task.title()} this audio{spoken}{' into English' if task == 'translate' else ''}"
        return SpeechRequest(f"<start_of_turn>user\n{ask}: <audio_soft_token><end_of_turn>\n<start_of_turn>model\n")
