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
from torch.nn import functional as F

from ..callers.errors import ConfigError
from .mel import MelSpec, filter_bank, read_mel_spec

_GUARD = 2.0**-24  # added to energies
_EPS = 1e-5  # added to deviations
_BLOCK = 128  # frames that are computed at a time if they are not normalised


@dataclass(frozen=True)
class NemoMelSpec(MelSpec):
    """Parameters of the spectrogram; lengths are in samples.

    Args:
        preemphasis: share of each sample that is subtracted from the next one.
        dither: amplitude of noise that is added to the samples. Its seed is their number, so equal audio gets equal noise.
        normalizes: whether each band is scaled to mean 0 and variance 1. If not, a frame depends on its own samples only, and
            its bits are the same in an item of any length.
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
    keys = ("preemphasis", "dither") if default.dither else ("preemphasis",)  # other published classes read no dither
    numbers: dict[str, Any] = {name: audio.get(name, getattr(default, name)) or 0.0 for name in keys}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name} of the feature extractor is {value!r}; give a number from 0 to 1")
    return replace(base, win_length=win_length, **numbers)


def nemo_log_mel(samples: Tensor, spec: NemoMelSpec, first_frames: Tensor | None = None) -> Tensor:
    """Convert float32 `[n]` to float32 `[n // hop_length, num_mel_bins]`; there are at least two frames.

    `first_frames`: the first frames, if they were computed before and are not normalised.
    """
    if spec.dither:
        noise = torch.randn(len(samples), generator=torch.Generator().manual_seed(len(samples)))
        samples = samples + spec.dither * noise
    samples = torch.cat((samples[:1], samples[1:] - spec.preemphasis * samples[:-1]))
    frames, half = spec.num_frames(len(samples)), spec.n_fft // 2
    if not spec.normalizes:
        return _in_blocks(F.pad(samples, (half, half + _BLOCK * spec.hop_length)), frames, spec, first_frames)
    bands = _bands(F.pad(samples, (half, half)), spec)[:frames]
    bands -= bands.mean(0)
    return bands / ((bands.square().sum(0) / (frames - 1)).sqrt() + _EPS)


def _in_blocks(padded: Tensor, frames: int, spec: NemoMelSpec, first_frames: Tensor | None) -> Tensor:
    """Return the frames; whole blocks of `first_frames` are taken from it. All blocks have one shape, on which bits depend."""
    parts = [] if first_frames is None else [first_frames[: len(first_frames) // _BLOCK * _BLOCK].float()]
    for first in range(sum(map(len, parts)), frames, _BLOCK):
        start = first * spec.hop_length
        block = _bands(padded[start : start + (_BLOCK - 1) * spec.hop_length + spec.n_fft], spec)
        parts.append(block[: frames - first])
    return torch.cat(parts)


def _bands(padded: Tensor, spec: NemoMelSpec) -> Tensor:
    """Return the logarithms of the bands' energies, `[frames, num_mel_bins]`."""
    window, filters = _bank(spec)
    shape = spec.n_fft, spec.hop_length, spec.win_length
    waves = torch.stft(padded, *shape, window, center=False, return_complex=True)
    magnitudes = torch.view_as_real(waves).square().sum(-1).sqrt()
    return (filters @ magnitudes.square()).T.contiguous().add_(_GUARD).log_()


@functools.lru_cache(maxsize=8)
def _bank(spec: NemoMelSpec) -> tuple[Tensor, Tensor]:
    """Return the window `[win_length]` and the filters `[num_mel_bins, n_fft // 2 + 1]`."""
    return torch.hann_window(spec.win_length or spec.n_fft, periodic=False), filter_bank(spec).T.contiguous()
