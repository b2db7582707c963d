"""Log-mel spectrograms as NeMo computes them: natural logarithms, each band usually scaled to mean 0 and variance 1.

Sources: the published feature extractors of Parakeet and Cohere's transcription models.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import ConfigError
from .mel import MelSpec, filter_bank, read_mel_spec

_GUARD = 2.0**-24  # added to energies
_EPS = 1e-5  # added to deviations


@dataclass(frozen=True)
class NemoMelSpec(MelSpec):
    """Parameters of the spectrogram; lengths are in samples.

    Args:
        preemphasis: share of each sample that is subtracted from the next one.
        dither: amplitude of noise that is added to the samples. Its seed is their number, so equal audio gets equal noise.
        normalizes: whether each band is scaled to mean 0 and variance 1.
    """

    n_fft: int = 512
    win_length: int | None = 400
    max_samples: int = 960_000
    preemphasis: float = 0.97
    dither: float = 0.0
    normalizes: bool = True

    def num_frames(self, samples: int) -> int:
        return samples // self.hop_length


def read_nemo_mel_spec(audio: Mapping[str, Any], default: NemoMelSpec) -> NemoMelSpec:
    """Read the JSON of the feature extractor; ConfigError for a value out of its range or a feature that is not supported."""
    base = read_mel_spec({key: value for key, value in audio.items() if key != "dither"}, default)
    assert isinstance(base, NemoMelSpec)
    win_length = audio.get("win_length", default.win_length)
    if isinstance(win_length, bool) or not isinstance(win_length, int) or not 1 < win_length <= base.n_fft:
        raise ConfigError(f"win_length of the feature extractor is {win_length!r}; give 2 to n_fft {base.n_fft} samples")
    numbers: dict[str, Any] = {name: audio.get(name, getattr(default, name)) or 0.0 for name in ("preemphasis", "dither")}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name} of the feature extractor is {value!r}; give a number from 0 to 1")
    return replace(base, win_length=win_length, **numbers)


def nemo_log_mel(samples: Tensor, spec: NemoMelSpec) -> Tensor:
    """Convert float32 `[n]` to float32 `[n // hop_length, num_mel_bins]`; there are at least two frames."""
    if spec.dither:
        noise = torch.randn(len(samples), generator=torch.Generator().manual_seed(len(samples)))
        samples = samples + spec.dither * noise
    samples = torch.cat((samples[:1], samples[1:] - spec.preemphasis * samples[:-1]))
    window, filters = _bank(spec)
    frames, length = spec.num_frames(len(samples)), spec.win_length
    waves = torch.stft(samples, spec.n_fft, spec.hop_length, length, window, pad_mode="constant", return_complex=True)
    magnitudes = torch.view_as_real(waves).square().sum(-1).sqrt()
    bands = (filters @ magnitudes.square()).T[:frames].contiguous()
    bands = bands.add_(_GUARD).log_()
    if not spec.normalizes:
        return bands
    bands -= bands.mean(0)
    return bands / ((bands.square().sum(0) / (frames - 1)).sqrt() + _EPS)


@functools.lru_cache(maxsize=8)
def _bank(spec: NemoMelSpec) -> tuple[Tensor, Tensor]:
    """Return the window `[win_length]` and the filters `[num_mel_bins, n_fft // 2 + 1]`."""
    return torch.hann_window(spec.win_length or spec.n_fft, periodic=False), filter_bank(spec).T.contiguous()
