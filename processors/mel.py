"""Log-mel spectrograms as Whisper's feature extractor computes them, from mono samples.

Sources: arXiv 2212.04356 (25 ms windows every 10 ms, log10, clipped to 8 powers of ten below the maximum), Slaney's Auditory
Toolbox (mel scale: linear below 1 kHz, logarithmic above; filters of equal area).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..callers.errors import ConfigError, InputError
from ..kernels.mel import log_mel_energies
from ..kernels.mel.filters import MelFilterBank, make_mel_filter_bank
from .device import media_device

_FRAMES_PER_TRANSFER = 1 << 13  # to a device
_MIN_ENERGY = 1e-10  # smallest energy of a band


@dataclass(frozen=True)
class MelSpec:
    """Parameters of a log-mel spectrogram; lengths are in samples.

    Args:
        max_samples: length of the longest audio that the model takes.
        win_length: samples in the middle of an FFT window that are weighted; None: all `n_fft`.
        end_frame: also compute the frame that is centred on the end of the audio.
        htk: filters of equal height on the HTK mel scale, which is logarithmic throughout, instead of Slaney's.
        max_energy: log10 of the energy below which `kept` powers of ten are kept; None: that of the loudest band.
        kept: powers of ten kept below the loudest band.
        decibels: the result is `10 * log10(energy)` instead of `(log10(energy) + 4) / 4`.
    """

    num_mel_bins: int = 80
    sampling_rate: int = 16000
    n_fft: int = 400
    hop_length: int = 160
    max_samples: int = 480_000
    win_length: int | None = None
    end_frame: bool = False
    htk: bool = False
    max_energy: float | None = None
    kept: float = 8.0
    decibels: bool = False

    def num_frames(self, samples: int) -> int:
        """Return the number of frames with audio. With a hop of 160: 1 for 1-160 samples; with `end_frame`, 1 for 0-159."""
        return samples // self.hop_length + 1 if self.end_frame else -(-samples // self.hop_length)


def read_mel_spec(audio: Mapping[str, Any], default: MelSpec) -> MelSpec:
    """Read the JSON of a Whisper-style feature extractor.

    Raises:
        ConfigError: a value is not a positive integer, or a feature is not supported.
    """
    names = {"num_mel_bins": "feature_size", "sampling_rate": "sampling_rate", "n_fft": "n_fft", "hop_length": "hop_length"}
    values = {name: audio.get(key, getattr(default, name)) for name, key in names.items()}
    values["seconds"] = audio.get("chunk_length", default.max_samples // default.sampling_rate)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{names.get(name, 'chunk_length')} of the feature extractor is {value!r}; give a positive integer"
            )
    if audio.get("dither"):  # `do_normalize` is an argument of calls, which the published class does not read from its JSON
        raise ConfigError("dither of the feature extractor adds random noise to every input; set it to 0")
    max_samples = values.pop("seconds") * values["sampling_rate"]
    return replace(default, **values, max_samples=max_samples)


def log_mel(samples: Tensor, spec: MelSpec, length: int | None = None, max_frames: int | None = None) -> Tensor:
    """Convert float32 `[n]` to float32 `[frames, num_mel_bins]` on the same device: `(log10(energy) + 4) / 4`, about -1..1.5.

    With `spec.decibels` the result is `10 * log10(energy)`.

    Args:
        length: pad the audio with silence to this many samples; None: no padding. This makes
            `length // hop_length` frames, one more with `end_frame`.
        max_frames: return only the first frames; frames of silence are not computed. None: all.

    Raises:
        InputError: the audio is longer than `length`, or too short for the reflection at its ends.
    """
    count, edge = len(samples), spec.n_fft // 2
    length = count if length is None else length
    if count > length or length <= edge:
        raise InputError(
            f"{count} samples do not fit a window of {length}, or the window is not longer than half a frame ({edge})"
        )
    total = length // spec.hop_length + spec.end_frame
    returned = total if max_frames is None else min(max_frames, total)
    computed = min(total, (count + edge) // spec.hop_length + 1)  # frames that overlap a sample
    padded = _pad_reflect(samples, length, edge, (computed - 1) * spec.hop_length + spec.n_fft)
    bands = _log_bands(padded, spec)
    loudest = float(bands.max() if spec.max_energy is None else spec.max_energy)
    if returned <= computed:
        out = bands[:returned]
    else:
        out = bands.new_full((returned, spec.num_mel_bins), math.log10(_MIN_ENERGY))
        out[:computed] = bands
    return _scaled(out, spec, loudest)


def log_mel_frames(samples: Tensor, spec: MelSpec) -> Tensor:
    """Convert the whole frames of `samples` as `log_mel` does, without padding. `spec` has a `max_energy`."""
    assert spec.max_energy is not None
    return _scaled(_log_bands(samples, spec), spec, spec.max_energy)


def _scaled(bands: Tensor, spec: MelSpec, loudest: float) -> Tensor:
    """Clip log energies to `spec.kept` powers of ten below the loudest, in place, and scale them as `log_mel` says."""
    bands.clamp_(min=loudest - spec.kept)
    return bands.mul_(10.0) if spec.decibels else bands.add_(4.0).mul_(0.25)


def _log_bands(padded: Tensor, spec: MelSpec) -> Tensor:
    """Return log energies `[frames, num_mel_bins]` of all FFT windows, computed on the media device."""
    device = media_device()
    if device is None:
        return log_mel_energies(padded.unfold(0, spec.n_fft, spec.hop_length), _bank(spec, padded.device), _MIN_ENERGY)
    out, bank = torch.empty((len(padded) - spec.n_fft) // spec.hop_length + 1, spec.num_mel_bins), _bank(spec, device.device)

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(out), _FRAMES_PER_TRANSFER):
            part = out[first : first + _FRAMES_PER_TRANSFER]
            yield padded[first * spec.hop_length :][: (len(part) - 1) * spec.hop_length + spec.n_fft], part

    device.fill(parts(), lambda part: log_mel_energies(part.unfold(0, spec.n_fft, spec.hop_length), bank, _MIN_ENERGY))
    return out


def _pad_reflect(samples: Tensor, length: int, edge: int, needed: int) -> Tensor:
    """Pad with silence to `length` samples, reflect `edge` samples at both ends, and return the first `needed` samples."""
    out = torch.zeros(needed, device=samples.device)
    body = samples[: max(0, needed - edge)]
    out[edge : edge + len(body)] = body
    out[:edge] = out[edge + 1 : 2 * edge + 1].flip(0) if needed > 2 * edge else 0.0
    over = needed - edge - length
    if over > 0:
        out[edge + length :] = out[edge + length - 1 - over : edge + length - 1].flip(0)
    return out


@functools.lru_cache(maxsize=8)
def _bank(spec: MelSpec, device: torch.device) -> MelFilterBank:
    win_length = spec.n_fft if spec.win_length is None else spec.win_length
    left = (spec.n_fft - win_length) // 2
    window = F.pad(torch.hann_window(win_length), (left, spec.n_fft - win_length - left))
    return make_mel_filter_bank(window, filter_bank(spec), device)


def filter_bank(spec: MelSpec) -> Tensor:
    """Return triangular filters from 0 Hz to half the sampling rate: float32 `[n_fft // 2 + 1, num_mel_bins]`."""
    nyquist = spec.sampling_rate / 2
    hertz = np.linspace(0, nyquist, spec.n_fft // 2 + 1)
    if spec.htk:
        corners = 700 * (10 ** (np.linspace(0, math.log10(1 + nyquist / 700), spec.num_mel_bins + 2)) - 1)
    else:
        corners = _to_hertz(np.linspace(0, _to_mel(nyquist), spec.num_mel_bins + 2))
    rise = (hertz[:, None] - corners[:-2]) / np.diff(corners)[:-1]
    fall = (corners[2:] - hertz[:, None]) / np.diff(corners)[1:]
    triangles = np.maximum(0, np.minimum(rise, fall)) * (1 if spec.htk else 2 / (corners[2:] - corners[:-2]))
    return torch.from_numpy(triangles.astype(np.float32))


_LINEAR = 200 / 3  # hertz per mel below 1 kHz, which is mel 15; above, 27 mels are a factor of 6.4
_STEP = math.log(6.4) / 27


def _to_mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < 1000 else 15 + math.log(hertz / 1000) / _STEP


def _to_hertz(mel: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(mel < 15, mel * _LINEAR, 1000 * np.exp((mel - 15) * _STEP))
