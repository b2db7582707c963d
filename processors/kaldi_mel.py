"""Log-mel spectrograms of whole frames with filters on Kaldi's mel scale: natural logarithms of energies.

Sources: the feature extractor of Phi-4-multimodal (Hamming window, preemphasis within a frame, triangles in mel), and
torchaudio's `compliance.kaldi.fbank`, which also subtracts the mean of a frame and has the Povey window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..callers.errors import ConfigError
from .mel import MelSpec, read_mel_spec


@dataclass(frozen=True)
class KaldiMelSpec(MelSpec):
    """Parameters of the spectrogram; lengths are in samples.

    Args:
        low, high: frequencies in hertz between which the mel bands lie.
        preemphasis: share of each sample that is subtracted from the next one.
        sample_scale: factor of samples in -1..1; 32768 makes them 16-bit samples.
        centered: the mean of each frame is subtracted first.
        floor: smallest energy of a band.
        povey: the window is Hann's to the power of 0.85, which is 0 at both ends, instead of Hamming's.
    """

    n_fft: int = 512
    win_length: int | None = 400
    low: float = 0.0
    high: float = 7690.0
    preemphasis: float = 0.97
    sample_scale: float = 32768.0
    centered: bool = False
    floor: float = 1.0
    povey: bool = False

    @property
    def window(self) -> int:
        return self.win_length or self.n_fft

    def num_frames(self, samples: int) -> int:
        """Return the number of whole frames."""
        return max(0, (samples - self.window) // self.hop_length + 1)

    def least_samples(self, frames: int) -> int:
        """Return the fewest samples that make this many frames."""
        return self.window + (frames - 1) * self.hop_length


def read_kaldi_mel_spec(audio: Mapping[str, Any], default: KaldiMelSpec) -> KaldiMelSpec:
    """Read the JSON of the feature extractor; ConfigError for a value that is not supported."""
    spec = read_mel_spec({key: value for key, value in audio.items() if key != "do_normalize"}, default)  # that of images
    assert isinstance(spec, KaldiMelSpec)
    spec = replace(
        spec,
        win_length=audio.get("win_length", default.win_length),
        low=audio.get("mel_min_frequency", default.low),
        high=audio.get("mel_max_frequency", default.high),
        preemphasis=audio.get("preemphasis", default.preemphasis),
    )
    if not 1 <= spec.window <= spec.n_fft:
        raise ConfigError(f"win_length of the feature extractor is {spec.window}; it must be from 1 to n_fft {spec.n_fft}")
    if not 0 <= spec.low < spec.high <= spec.sampling_rate / 2 or not 0 <= spec.preemphasis < 1:
        raise ConfigError(
            "mel_min_frequency and mel_max_frequency of the feature extractor must be ascending and at most half of "
            "sampling_rate, and preemphasis from 0 to 1"
        )
    return spec


def kaldi_log_mel(samples: Tensor, spec: KaldiMelSpec) -> Tensor:
    """Convert float32 `[n]` to float32 `[frames, num_mel_bins]`."""
    frames = samples.unfold(0, spec.window, spec.hop_length)
    if spec.centered:
        frames = frames - frames.mean(1, keepdim=True)
    earlier = torch.cat((frames[:, :1], frames[:, :-1]), 1)
    frames = (frames - spec.preemphasis * earlier) * spec.sample_scale
    spectrum = torch.fft.rfft(_window(spec) * frames, n=spec.n_fft).to(torch.complex64)
    bands: Tensor = spectrum.abs().square_() @ _filters(spec)
    return bands.clamp_(min=spec.floor).log_()


def _window(spec: KaldiMelSpec) -> Tensor:
    """Return the window, float64 `[window]`."""
    if spec.povey:
        return torch.hann_window(spec.window, periodic=False, dtype=torch.float64) ** 0.85
    return torch.hamming_window(spec.window, periodic=False, dtype=torch.float64)


@functools.lru_cache(maxsize=8)
def _filters(spec: KaldiMelSpec) -> Tensor:
    """Return filters that are triangles of equal height and width in mel, float32 `[n_fft // 2 + 1, num_mel_bins]`."""
    low, high = (1127.0 * math.log(1.0 + edge / 700.0) for edge in (spec.low, spec.high))
    corners = np.linspace(low, high, spec.num_mel_bins + 2)
    hertz = np.arange(spec.n_fft // 2 + 1) * (spec.sampling_rate / spec.n_fft)
    slopes, widths = corners - 1127.0 * np.log(1.0 + hertz / 700.0)[:, None], np.diff(corners)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return torch.from_numpy(triangles.astype(np.float32))
