"""Base of families that take audio as log-mel frames, in one window of the encoder."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from dataclasses import replace
from typing import ClassVar

import torch

from ...callers.errors import InputError
from ...mm.embeddings import ROWS
from ...mm.fields import BatchedField, FieldElem, FlatField
from ...mm.media.policy import DecodeSpec
from ...mm.types import AudioItem, EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..mel import MelSpec, log_mel, read_mel_spec
from .base import BaseProcessingInfo


class AudioInfo(BaseProcessingInfo):
    """Base of families with a single window of audio. They define `num_rows` and may override `num_input_frames`.

    `mel_defaults`: the defaults of the published feature extractor.
    """

    modalities: tuple[str, ...] = ("audio",)
    valid_kwargs = {"audio": ()}
    mel_defaults: ClassVar[MelSpec] = MelSpec()

    @abstractmethod
    def num_rows(self, frames: int) -> int:
        """Return the number of encoder rows for this many frames of audio."""

    def num_item_rows(self, samples: int) -> int:
        """Return the number of encoder rows for this many samples; it grows with them. Default: those for their frames."""
        return self.num_rows(self.mel_spec.num_frames(samples))

    def num_input_frames(self, frames: int) -> int:
        """Return the number of frames, with padding, that the encoder reads for `frames` of audio. Default: a full window."""
        return self.mel_spec.max_samples // self.mel_spec.hop_length

    def resolve_spec(self, modality: str) -> MelSpec:
        default, config = self.mel_defaults, self.files.config.get("audio_config") or {}
        if not self.files.audio and config.get("num_mel_bins"):  # without a preprocessor's JSON, only config.json states them
            default = replace(default, num_mel_bins=config["num_mel_bins"])
        spec = read_mel_spec(self.files.audio, default)
        self.check_config("audio_config", num_mel_bins=spec.num_mel_bins)
        return spec

    @property
    def mel_spec(self) -> MelSpec:
        spec: MelSpec = self.specs["audio"]
        return spec

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec(rate=self.mel_spec.sampling_rate, max_audio_samples=self.mel_spec.max_samples)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return a grid of one temporal step per row, with positions of text. InputError if it is too long or too short."""
        spec, samples = self.mel_spec, header.samples
        if not header.exact:  # an upper bound: decoding stops at the model's maximum
            samples = min(samples, spec.max_samples)
        if samples > spec.max_samples:
            lasts, most = samples / spec.sampling_rate, spec.max_samples / spec.sampling_rate
            reason = f"it lasts {lasts:.2f} s, the model takes at most {most:g} s; cut it into several items"
            raise InputError(reason, code="over_limit", limit=most, value=lasts)
        rows = self.num_item_rows(samples)
        if not rows:
            least = bisect_left(range(spec.max_samples), 1, key=self.num_item_rows)
            milliseconds = 1000 * least / spec.sampling_rate
            raise InputError(f"its {samples} samples are too few for one token; give at least {least} ({milliseconds:.0f} ms)")
        return ItemGeometry(rows, 1, 1, linear=True)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        rows, most = len(item.tensors[ROWS]), self.num_item_rows(self.mel_spec.max_samples)
        if rows > most:
            raise InputError(f"it holds {rows} rows, the model takes at most {most} per audio; split it into several items")
        return ItemGeometry(rows, 1, 1, linear=True)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[frames, num_mel_bins]` and `audio_frames`, the number of frames that contain audio."""
        samples, geometry = audio_samples(item), self.geometry(item.header)
        frames = self.mel_spec.num_frames(len(samples))
        features = log_mel(samples, self.mel_spec, self.mel_spec.max_samples, self.num_input_frames(frames))
        return audio_kwargs(features, frames, dtype), geometry


def audio_samples(item: MediaItem) -> torch.Tensor:
    """Return the samples of an audio item; TypeError for any other item."""
    if not isinstance(item, AudioItem):
        raise TypeError(f"expected an AudioItem, not a {type(item).__name__}")
    return item.samples


def audio_kwargs(features: torch.Tensor, frames: int, dtype: torch.dtype) -> dict[str, FieldElem]:
    """Return `input_features` `[n, bins]` in `dtype` and `audio_frames`, a scalar on the CPU."""
    return {
        "input_features": FieldElem(features.to(dtype), FlatField()),
        "audio_frames": FieldElem(torch.tensor(frames), BatchedField(keep_on_cpu=True)),
    }
