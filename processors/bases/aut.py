"""Base of families with Qwen's AuT audio encoder: audio of any length, convolved in chunks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from ...mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ..mel import MelSpec, log_mel
from .audio import AudioInfo, audio_kwargs, audio_samples


@dataclass(frozen=True)
class AutMelSpec(MelSpec):
    """`min_samples`: shorter audio is padded with silence to this. `chunk`: frames that the encoder convolves together."""

    min_samples: int = 0
    chunk: int = 100

    def num_frames(self, samples: int) -> int:
        """Return the frames; a remainder shorter than a hop makes none."""
        return max(samples, self.min_samples) // self.hop_length


class AutInfo(AudioInfo):
    """An AudioInfo for the AuT encoder.

    `max_seconds`: the longest audio. `default_min_samples`: default of the preprocessor's `min_length`.
    """

    mel_defaults = MelSpec(num_mel_bins=128)
    max_seconds: ClassVar[int]
    default_min_samples: ClassVar[int] = 0

    def resolve_spec(self, modality: str) -> AutMelSpec:
        spec, half = super().resolve_spec(modality), (self.files.config.get("audio_config") or {}).get("n_window", 50)
        min_samples = self.files.audio.get("min_length", self.default_min_samples)
        max_samples = self.max_seconds * spec.sampling_rate
        return AutMelSpec(**asdict(spec) | {"max_samples": max_samples}, min_samples=min_samples, chunk=2 * half)

    def num_rows(self, frames: int) -> int:
        """Return the rows after three convolutions of stride 2 over each chunk."""
        chunk: int = self.specs["audio"].chunk
        chunks, rest = divmod(frames, chunk)
        return chunks * -(-chunk // 8) + -(-rest // 8)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[frames, num_mel_bins]`, not padded to a window, and `audio_frames`."""
        samples, spec, geometry = audio_samples(item), self.specs["audio"], self.geometry(item.header)
        features = log_mel(F.pad(samples, (0, max(0, spec.min_samples - len(samples)))), spec)
        return audio_kwargs(features, len(features), dtype), geometry
