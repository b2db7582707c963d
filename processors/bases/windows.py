"""Base of families that cut long audio into windows of their encoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...mm.fields import BatchedField, FieldElem, FlatField
from ...mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ..mel import MelSpec, log_mel
from .audio import AudioInfo, audio_samples


@dataclass(frozen=True)
class WindowedMelSpec(MelSpec):
    """`window_samples`: length of an encoder window. `max_samples`: length of all windows that the model takes together."""

    window_samples: int = 480_000

    @property
    def window_frames(self) -> int:
        return self.window_samples // self.hop_length

    def num_windows(self, samples: int) -> int:
        return -(-samples // self.window_samples)

    def num_distinct_frames(self, samples: int) -> int:
        """Return the number of frames that overlap a sample, plus one frame of silence; all later frames equal it."""
        all_frames = self.num_windows(samples) * self.window_samples // self.hop_length
        return min(all_frames, (samples + self.n_fft // 2) // self.hop_length + 2)


class WindowedAudioInfo(AudioInfo):
    """Base of families with windows; each defines `num_rows`.

    `clip_per_window`: clip energies relative to the loudest band of each window, not of the whole audio.
    """

    clip_per_window: ClassVar[bool] = False

    @property
    def stack_factor(self) -> int:
        """Number of encoder outputs, of two frames each, that are stacked to one row."""
        return 4

    def max_windows(self, seconds: int, rows: int) -> int:
        """Return the largest number of windows; by default as many as fit the context. `seconds`, `rows`: of one window."""
        return max(1, int(self.text_config["max_position_embeddings"]) // rows)

    @property
    def mel_spec(self) -> WindowedMelSpec:
        spec: WindowedMelSpec = self.specs["audio"]
        return spec

    def resolve_spec(self, modality: str) -> WindowedMelSpec:
        spec = super().resolve_spec(modality)
        outputs = spec.max_samples // spec.hop_length // 2
        self.check_config("audio_config", max_source_positions=outputs, max_position_embeddings=outputs)
        windows = self.max_windows(spec.max_samples // spec.sampling_rate, outputs // self.stack_factor)
        return WindowedMelSpec(**asdict(spec) | {"max_samples": windows * spec.max_samples}, window_samples=spec.max_samples)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the features of all windows, without the repeated frames of silence at their ends.

        `input_features` `[frames, num_mel_bins]`, `audio_frames` `[windows]` (frames of each window), `audio_windows` (their
        number) and `audio_rows` (rows of the item).
        """
        samples, spec, geometry = audio_samples(item), self.mel_spec, self.geometry(item.header)
        windows = self.window_features(samples)
        frames = torch.tensor([len(window) for window in windows])
        return {
            "input_features": FieldElem(torch.cat(windows).to(dtype), FlatField()),
            "audio_frames": FieldElem(frames, FlatField(keep_on_cpu=True)),
            "audio_windows": FieldElem(torch.tensor(spec.num_windows(len(samples))), BatchedField(keep_on_cpu=True)),
            "audio_rows": FieldElem(torch.tensor(geometry.num_embeds), BatchedField(keep_on_cpu=True)),
        }, geometry

    def window_features(self, samples: Tensor) -> list[Tensor]:
        """Return the features `[frames, num_mel_bins]` of each window."""
        spec = self.mel_spec
        parts = samples.split(spec.window_samples) if self.clip_per_window else [samples]
        features = [
            log_mel(part, spec, spec.num_windows(len(part)) * spec.window_samples, spec.num_distinct_frames(len(part)))
            for part in parts
        ]
        return features if self.clip_per_window else list(features[0].split(spec.window_frames))
