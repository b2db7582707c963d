"""Families that take sounds as log-mel frames, each in one window of its encoder. Knows no family and no model."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from ..mm.embeddings import ROWS
from ..mm.errors import InputError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.media.policy import DecodeSpec
from ..mm.types import AudioItem, EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .base import FamilyInfo
from .mel import MelSpec, log_mel, read_mel_spec


class SoundInfo(FamilyInfo):
    """A family says how many rows so many sounding frames make (`num_rows`), and how many frames its encoder reads.

    `mel`: the published feature extractor's own defaults.
    """

    modalities: tuple[str, ...] = ("audio",)
    known = {"audio": ()}
    mel: ClassVar[MelSpec] = MelSpec()

    @abstractmethod
    def num_rows(self, frames: int) -> int:
        """Rows of a sound of so many frames."""

    def num_frames(self, sounding: int) -> int:
        """Frames that the encoder reads of a sound, those of the silence behind it included: the whole window."""
        return self.window.longest // self.window.hop

    def read(self, modality: str) -> MelSpec:
        spec = read_mel_spec(self.files.audio, self.mel)
        self.agree("audio_config", num_mel_bins=spec.mels)
        return spec

    @property
    def window(self) -> MelSpec:
        spec: MelSpec = self.specs["audio"]
        return spec

    def decoding(self) -> DecodeSpec:
        return DecodeSpec(rate=self.window.rate, longest_sound=self.window.longest)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """A step per embedding, as of text; InputError for a sound that is longer than the window, or that makes no row."""
        spec, samples = self.window, header.samples
        if not header.exact:  # decoding gives no more, and may give less
            samples = min(samples, spec.longest)
        if samples > spec.longest:
            lasts, most = samples / spec.rate, spec.longest / spec.rate
            raise InputError(f"it lasts {lasts:.2f} s, the model takes at most {most:g} s; cut it into several items")
        rows = self.num_rows(spec.frames(samples))
        if not rows:
            frames = next(frames for frames in range(spec.longest) if self.num_rows(frames))
            least = (frames - 1) * spec.hop + 1
            raise InputError(f"its {samples} samples make no token; {least} ({1000 * least / spec.rate:.0f} ms) are needed")
        return ItemGeometry(rows, 1, 1, linear=True)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        rows, most = len(item.tensors[ROWS]), self.num_rows(self.window.frames(self.window.longest))
        if rows > most:
            raise InputError(f"it holds {rows} rows, the model takes at most {most} for one sound; give several")
        return ItemGeometry(rows, 1, 1, linear=True)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[frames, mels]` and `audio_frames`, how many of them hold sound."""
        if not isinstance(item, AudioItem):
            raise TypeError(f"a {type(item).__name__} is no sound")
        grid, sounding = self.geometry(item.header), self.window.frames(len(item.samples))
        features = log_mel(item.samples, self.window, self.window.longest, self.num_frames(sounding))
        frames = FieldElem(torch.tensor(sounding), BatchedField(keep_on_cpu=True))
        return {"input_features": FieldElem(features.to(dtype), FlatField()), "audio_frames": frames}, grid
