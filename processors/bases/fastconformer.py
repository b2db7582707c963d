"""Base of families whose encoder is FastConformer: one window of NeMo's log-mel frames, eight of which make a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...callers.errors import ConfigError
from ...mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ..nemo_mel import NemoMelSpec, nemo_log_mel, read_nemo_mel_spec
from .audio import AudioInfo, audio_kwargs, audio_samples


class FastConformerInfo(AudioInfo):
    """`encoder_defaults`: values of `encoder_config` that published config.json files leave out."""

    mel_defaults: ClassVar[NemoMelSpec] = NemoMelSpec()
    encoder_defaults: ClassVar[Mapping[str, Any]] = {}

    @property
    def encoder_config(self) -> Mapping[str, Any]:
        """The raw section of the encoder, with defaults."""
        return {"subsampling_factor": 8, **self.encoder_defaults, **(self.files.config.get("encoder_config") or {})}

    def resolve_spec(self, modality: str) -> NemoMelSpec:
        spec, most = read_nemo_mel_spec(self.files.audio, self.mel_defaults), self.mel_defaults
        self.check_config("encoder_config", num_mel_bins=spec.num_mel_bins)
        factor = self.encoder_config["subsampling_factor"]
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise ConfigError(f"subsampling_factor of encoder_config is {factor!r}; it must be a positive integer")
        seconds = self.files.audio.get("max_audio_clip_s", most.max_samples / most.sampling_rate)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1 <= seconds <= 3600:
            raise ConfigError(f"max_audio_clip_s of the feature extractor is {seconds!r}; give 1 to 3600 seconds")
        return replace(spec, max_samples=round(seconds * spec.sampling_rate))

    def num_rows(self, frames: int) -> int:
        """Return a row per eight frames, the last of them incomplete. A single frame has no variance."""
        return -(-frames // int(self.encoder_config["subsampling_factor"])) if frames > 1 else 0

    @property
    def row_seconds(self) -> float:
        """Seconds of audio per encoder row."""
        return float(self.encoder_config["subsampling_factor"] * self.mel_spec.hop_length / self.mel_spec.sampling_rate)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[frames, num_mel_bins]` and `audio_frames`, their number."""
        samples, geometry, spec = audio_samples(item), self.geometry(item.header), self.mel_spec
        assert isinstance(spec, NemoMelSpec)
        features = nemo_log_mel(samples, spec)
        return audio_kwargs(features, len(features), dtype), geometry
