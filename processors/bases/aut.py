"""Families whose sounds go through the AuT encoder: any length, convolved in chunks. Knows no family and no model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.types import AudioItem, ItemGeometry, MediaItem, MultiModalKwargsItem
from .mel import MelSpec, log_mel
from .sounds import SoundInfo


@dataclass(frozen=True)
class AutMelSpec(MelSpec):
    """`least`: samples that a sound has at least, filled up with silence; `chunk`: frames that the encoder convolves alone."""

    least: int = 0
    chunk: int = 100

    def frames(self, samples: int) -> int:
        """Only whole hops make a frame."""
        return max(samples, self.least) // self.hop


class AutInfo(SoundInfo):
    """A SoundInfo. `seconds`: of the longest sound; `shortest`: samples that shorter ones are filled up to."""

    mel = MelSpec(mels=128)
    seconds: ClassVar[int]
    shortest: ClassVar[int] = 0

    def read(self, modality: str) -> AutMelSpec:
        made, half = super().read(modality), (self.files.config.get("audio_config") or {}).get("n_window", 50)
        least = self.files.audio.get("min_length", self.shortest)
        return AutMelSpec(**asdict(made) | {"longest": self.seconds * made.rate}, least=least, chunk=2 * half)

    def num_rows(self, frames: int) -> int:
        """Three convolutions of stride 2 over each chunk."""
        chunk: int = self.specs["audio"].chunk
        whole, rest = divmod(frames, chunk)
        return whole * -(-chunk // 8) + -(-rest // 8)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[frames, mels]` of the sound alone, and `audio_frames`, their number."""
        if not isinstance(item, AudioItem):
            raise TypeError(f"a {type(item).__name__} is no sound")
        spec, grid = self.specs["audio"], self.geometry(item.header)
        features = log_mel(F.pad(item.samples, (0, max(0, spec.least - len(item.samples)))), spec)
        frames = FieldElem(torch.tensor(len(features)), BatchedField(keep_on_cpu=True))
        return {"input_features": FieldElem(features.to(dtype), FlatField()), "audio_frames": frames}, grid
