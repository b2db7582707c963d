"""Input processing of Gemma 3n: images as squares of one size, audio of up to 30 s; all items have a fixed number of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ....callers.errors import ConfigError, InputError
from ....mm.embeddings import ROWS
from ....mm.languages import LANGUAGES
from ....mm.speech import SpeechRequest
from ....mm.tiling.whole import FixedSize
from ....mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.bases.with_audio import WithAudioInfo
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.interface import Span
from ....processors.spans import build_span
from ....processors.usm_mel import UsmMelSpec, read_usm_mel_spec, usm_log_mel
from .config import AUDIO, frames_per_row

MEL = UsmMelSpec(
    n_fft=1024, win_length=512, low=125.0, high=7600.0, floor=1e-5, adds_floor=False, preemphasis=0.97, multiple=128
)


class _Gemma3nAudioInfo(AudioInfo):
    """Audio of up to 30 s, which always has the same number of rows."""

    placeholders = {"audio": ("audio_token_id", 262273)}

    def resolve_spec(self, modality: str) -> UsmMelSpec:
        spec = read_usm_mel_spec(self.files.audio, MEL)
        frames = self.num_rows(0) * frames_per_row(AUDIO | (self.files.config.get("audio_config") or {}))
        most = (frames * spec.hop_length + (spec.win_length or spec.n_fft)) // spec.multiple * spec.multiple
        return replace(spec, max_samples=min(spec.max_samples, most))

    def num_rows(self, frames: int) -> int:
        return positive_int_or(self.files.config, "audio_soft_tokens_per_image", 188)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid, spec = super().geometry(header), self.specs["audio"]
        if header.exact and not spec.num_whole_frames(header.samples):
            least = next(samples for samples in range(spec.max_samples) if spec.num_whole_frames(samples))
            raise InputError(f"its {header.samples} samples are too few for one frame; give at least {least}")
        return grid

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        features = usm_log_mel(audio_samples(item), self.specs["audio"])
        return audio_kwargs(features, len(features), dtype), self.geometry(item.header)


class Gemma3nProcessingInfo(WithAudioInfo, TiledInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Gemma 3n.

    Images have a TiledInfo's tensors, one patch per row, and audio those of an AudioInfo.
    """

    modalities = ("image", "audio")
    placeholders = {"image": ("image_token_id", 262145), **_Gemma3nAudioInfo.placeholders}
    valid_kwargs = {"image": TILE_KWARGS, "audio": ()}
    text_config_defaults = {"vocab_size": 262400, "hidden_size": 2048}
    audio_info = _Gemma3nAudioInfo
    language_codes = tuple(LANGUAGES)
    tasks = ("transcribe", "translate")

    def resolve_token_ids(self) -> None:
        image = self.config_token_id("boi_token_id", 255999), self.config_token_id("eoi_token_id", 262144)
        audio = self.config_token_id("boa_token_id", 256000), self.config_token_id("eoa_token_id", 262272)
        self.edges = {"image": image, "audio": audio}

    def resolve_spec(self, modality: str) -> Any:
        if modality == "audio":
            return super().resolve_spec(modality)
        vision = self.files.config.get("vision_config") or {}
        expected = (vision.get("pretrained_cfg") or {}).get("input_size") or (3, 768, 768)
        json = self.files.image or {"size": expected[1:], "do_normalize": False, "resample": 2}  # as published
        rows = positive_int_or(self.files.config, "vision_soft_tokens_per_image", 256)
        size, side = height_width(json.get("size") or 224), math.isqrt(rows)
        if [*size] != [*expected[1:]]:
            raise self.files.mismatch_error(f"the encoder of config.json takes {expected[2]} x {expected[1]} pixels", size)
        if side**2 != rows or size[0] % side:
            raise ConfigError(f"vision_soft_tokens_per_image is {rows}, not a square whose side divides {size[0]} pixels")
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, tiling=FixedSize(size), patch=size[0] // side)
        return read_pixel_spec(json, spec, self.merged_kwargs[modality])

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        if item.modality == "audio":
            return super().embeds_geometry(item)
        grid, rows = self.geometry(MediaHeader("image", 1, 1)), len(item.tensors[ROWS])
        if rows != grid.num_embeds:
            raise InputError(f"it holds {rows} rows, an image of this model has {grid.num_embeds}", code="unsupported")
        return grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows between a start and an end token, with empty lines around."""
        start, end = self.edges[modality]
        span = build_span([(start,), geometry.num_embeds, (end,)], self.placeholder_ids[modality])
        return replace(span, before=self.encode("\n\n"), after=self.encode("\n\n"), merges=self.newline_merges)

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the prompt that vLLM transcribes with; the publisher's examples are like it."""
        name = None if language is None else LANGUAGES[language].title()
        spoken = "" if name is None else f" {'from' if task == 'translate' else 'into'} {name}"
        ask = f"{task.title()} this audio{spoken}{' into English' if task == 'translate' else ''}"
        return SpeechRequest(f"<start_of_turn>user\n{ask}: <audio_soft_token><end_of_turn>\n<start_of_turn>model\n")
