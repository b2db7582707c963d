"""Log-mel spectrograms as the feature extractors of Gemma compute them: natural logarithms of magnitudes, not of powers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..callers.errors import ConfigError
from .mel import MelSpec, read_mel_spec


@dataclass(frozen=True)
class UsmMelSpec(MelSpec):
    """Parameters of the spectrogram; lengths are in samples.

    Args:
        low, high: frequencies in hertz between which the mel bands lie.
        floor: added to the magnitude of a band, or its least value (`adds_floor`).
        preemphasis: share of each sample that is subtracted from the next one.
        multiple: audio is padded to a multiple of this at its end; 0: by half a window at its begin.
        mean, deviation: of each band; None: bands are not normalised.
    """

    num_mel_bins: int = 128
    n_fft: int = 512
    win_length: int | None = 320
    low: float = 0.0
    high: float = 8000.0
    floor: float = 1e-3
    adds_floor: bool = True
    preemphasis: float = 0.0
    multiple: int = 0
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None

    def num_whole_frames(self, samples: int) -> int:
        """Return the number of frames whose window, and the sample after it, are in the padded audio."""
        window = self.win_length or self.n_fft
        padded = -(-samples // self.multiple) * self.multiple if self.multiple else samples + window // 2
        return max(0, (padded - window - 1) // self.hop_length + 1)


def read_usm_mel_spec(audio: Mapping[str, Any], default: UsmMelSpec) -> UsmMelSpec:
    """Read the JSON of the feature extractor; ConfigError for a feature that is not supported."""
    base = read_mel_spec({key: value for key, value in audio.items() if key != "do_normalize"}, default)
    assert isinstance(base, UsmMelSpec)
    rate = base.sampling_rate
    window = default.win_length or default.n_fft
    frame = round(rate * audio["frame_length_ms"] / 1000) if "frame_length_ms" in audio else window
    hop = round(rate * audio["hop_length_ms"] / 1000) if "hop_length_ms" in audio else default.hop_length
    preemphasis, flavour = audio.get("preemphasis", default.preemphasis), audio.get("preemphasis_htk_flavor", True)
    if not flavour or audio.get("input_scale_factor", 1.0) != 1.0 or not 0 <= preemphasis < 1:
        raise ConfigError("preemphasis and input_scale_factor of the feature extractor must be the published ones")
    if frame != 2 * hop and not default.multiple:
        raise ConfigError(f"frame_length_ms must be twice hop_length_ms, but they make {frame} and {hop} samples")
    return replace(
        base,
        n_fft=2 ** math.ceil(math.log2(frame)) * (1 + bool(audio.get("fft_overdrive", default.n_fft >= 2 * window))),
        preemphasis=preemphasis,
        win_length=frame,
        hop_length=hop,
        low=audio.get("min_frequency", default.low),
        high=audio.get("max_frequency", default.high),
        floor=audio.get("mel_floor", default.floor),
        mean=tuple(audio["per_bin_mean"]) if audio.get("per_bin_mean") else None,
        deviation=tuple(audio["per_bin_stddev"]) if audio.get("per_bin_stddev") else None,
    )


def usm_log_mel(samples: Tensor, spec: UsmMelSpec) -> Tensor:
    """Convert float32 `[n]` to float32 `[frames, num_mel_bins]`."""
    window = spec.win_length or spec.n_fft
    padding = (0, -len(samples) % spec.multiple) if spec.multiple else (window // 2, 0)
    frames = F.pad(samples, padding).unfold(0, window + 1, spec.hop_length)
    if spec.preemphasis:
        first, rest = frames[:, :1] * (1 - spec.preemphasis), frames[:, 1:-1] - spec.preemphasis * frames[:, :-2]
        frames = torch.cat((first, rest), 1)
    spectrum = torch.fft.rfft(frames[:, :window] * torch.hann_window(window), n=spec.n_fft)
    bands = spectrum.abs().double() @ _filters(spec)
    bands = bands.add_(spec.floor).log_() if spec.adds_floor else bands.clamp_(min=spec.floor).log_()
    if spec.mean is not None:
        bands -= torch.tensor(spec.mean, dtype=torch.float64)
    if spec.deviation is not None:
        bands /= torch.tensor(spec.deviation, dtype=torch.float64)
    out: Tensor = bands.float()
    return out


@functools.lru_cache(maxsize=8)
def _filters(spec: UsmMelSpec) -> Tensor:
    """Return triangular filters of equal height on the HTK mel scale, float64 `[n_fft // 2 + 1, num_mel_bins]`."""
    hertz = np.linspace(0, spec.sampling_rate // 2, spec.n_fft // 2 + 1)
    low, high = (2595.0 * math.log10(1 + edge / 700) for edge in (spec.low, spec.high))
    corners = 700.0 * (10.0 ** (np.linspace(low, high, spec.num_mel_bins + 2) / 2595.0) - 1)
    widths = np.diff(corners)
    slopes = corners - hertz[:, None]
    return torch.from_numpy(np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:])))
