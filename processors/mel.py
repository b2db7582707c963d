"""Log-mel spectrograms of the Whisper family from mono samples. Knows no model, no file and no rate but its own.

Sources: arXiv 2212.04356 (25 ms windows every 10 ms, log10, floor of 8 below the loudest), Slaney's Auditory Toolbox
(the mel scale: linear below 1 kHz, logarithmic above; filters of equal area).
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

from ..kernels.mel import Bank, log_bands, make_bank
from ..mm.errors import ConfigError, InputError
from .device import media_device

_AT_ONCE = 1 << 13  # windows that go to a device
_FLOOR = 1e-10  # least energy of a band
_RANGE = 8.0  # powers of ten kept below the loudest band of the sound


@dataclass(frozen=True)
class MelSpec:
    """How sound becomes bands. `window` and `hop` in samples; `longest`: samples that an encoder's one pass takes.

    `heard`: samples in the middle of a window that count, None: all. `ends`: the frame around a sound's end is one, too.
    `plain`: filters are of equal height, at mels that are logarithmic throughout.
    """

    mels: int = 80
    rate: int = 16000
    window: int = 400
    hop: int = 160
    longest: int = 480_000
    heard: int | None = None
    ends: bool = False
    plain: bool = False

    def frames(self, samples: int) -> int:
        """Frames that hold sound: 1 to 160 samples make one frame, 161 two; with the one around the end, each 160 one more."""
        return samples // self.hop + 1 if self.ends else -(-samples // self.hop)


def read_mel_spec(audio: Mapping[str, Any], default: MelSpec) -> MelSpec:
    """From the raw JSON of a Whisper-style feature extractor.

    Raises:
        ConfigError: a value that is no positive integer, or a feature that this op does not have, by its key.
    """
    names = {"mels": "feature_size", "rate": "sampling_rate", "window": "n_fft", "hop": "hop_length"}
    values = {name: audio.get(key, getattr(default, name)) for name, key in names.items()}
    values["seconds"] = audio.get("chunk_length", default.longest // default.rate)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{names.get(name, 'chunk_length')} of the feature extractor is {value!r}; give a positive integer"
            )
    if audio.get("dither") or audio.get("do_normalize"):
        raise ConfigError("dither and do_normalize of the feature extractor are not supported; remove them")
    longest = values.pop("seconds") * values["rate"]
    return replace(default, **values, longest=longest)


def log_mel(samples: Tensor, spec: MelSpec, length: int | None = None, frames: int | None = None) -> Tensor:
    """Float32 `[n]` -> float32 `[frames, mels]` on its device, about -1..1.5: `(log10(energy) + 4) / 4`, floored.

    Args:
        length: samples that the sound counts as, filled up with silence; None: `n`. It makes `length // hop` frames.
        frames: only the first so many; silence is not computed. None: all.

    Raises:
        InputError: a sound longer than `length`, or too short to be mirrored at its edges.
    """
    count, edge = len(samples), spec.window // 2
    length = count if length is None else length
    if count > length or length <= edge:
        raise InputError(f"{count} samples do not fit a window of {length}, or are not more than half a frame ({edge})")
    total = length // spec.hop + spec.ends
    wanted = total if frames is None else min(frames, total)
    sounding = min(total, (count + edge) // spec.hop + 1)  # frames that any sample falls into
    heard = _mirrored(samples, length, edge, (sounding - 1) * spec.hop + spec.window)
    bands = _log_bands(heard, spec)
    floor = bands.max() - _RANGE
    out = bands[:wanted] if wanted <= sounding else bands.new_full((wanted, spec.mels), math.log10(_FLOOR))
    if wanted > sounding:
        out[:sounding] = bands
    return out.clamp_(min=floor).add_(4.0).mul_(0.25)


def _log_bands(heard: Tensor, spec: MelSpec) -> Tensor:
    """Of every window of the samples, `[windows, mels]` where they are."""
    device = media_device()
    if device is None:
        return log_bands(heard.unfold(0, spec.window, spec.hop), _bank(spec, heard.device), _FLOOR)
    out, bank = torch.empty((len(heard) - spec.window) // spec.hop + 1, spec.mels), _bank(spec, device.device)

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(out), _AT_ONCE):
            some = out[first : first + _AT_ONCE]
            yield heard[first * spec.hop :][: (len(some) - 1) * spec.hop + spec.window], some

    device.fill(parts(), lambda part: log_bands(part.unfold(0, spec.window, spec.hop), bank, _FLOOR))
    return out


def _mirrored(samples: Tensor, length: int, edge: int, needed: int) -> Tensor:
    """The first `needed` samples of the sound, filled with silence to `length` and mirrored by `edge` at both ends."""
    out = torch.zeros(needed, device=samples.device)
    body = samples[: max(0, needed - edge)]
    out[edge : edge + len(body)] = body
    out[:edge] = out[edge + 1 : 2 * edge + 1].flip(0) if needed > 2 * edge else 0.0
    over = needed - edge - length
    if over > 0:
        out[edge + length :] = out[edge + length - 1 - over : edge + length - 1].flip(0)
    return out


@functools.lru_cache(maxsize=8)
def _bank(spec: MelSpec, device: torch.device) -> Bank:
    heard = spec.window if spec.heard is None else spec.heard
    left = (spec.window - heard) // 2
    window = F.pad(torch.hann_window(heard), (left, spec.window - heard - left))
    return make_bank(window, filter_bank(spec), device)


def filter_bank(spec: MelSpec) -> Tensor:
    """Triangles between 0 and half the rate, of equal area or height: float32 `[window // 2 + 1, mels]`."""
    hertz = np.linspace(0, spec.rate / 2, spec.window // 2 + 1)
    if spec.plain:
        corners = 700 * (10 ** (np.linspace(0, math.log10(1 + spec.rate / 2 / 700), spec.mels + 2)) - 1)
    else:
        corners = _to_hertz(np.linspace(0, _to_mel(spec.rate / 2), spec.mels + 2))
    rise = (hertz[:, None] - corners[:-2]) / np.diff(corners)[:-1]
    fall = (corners[2:] - hertz[:, None]) / np.diff(corners)[1:]
    triangles = np.maximum(0, np.minimum(rise, fall)) * (1 if spec.plain else 2 / (corners[2:] - corners[:-2]))
    return torch.from_numpy(triangles.astype(np.float32))


_LINEAR = 200 / 3  # hertz per mel below 1 kHz, which is mel 15; 27 mels make a factor of 6.4 above
_STEP = math.log(6.4) / 27


def _to_mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < 1000 else 15 + math.log(hertz / 1000) / _STEP


def _to_hertz(mel: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(mel < 15, mel * _LINEAR, 1000 * np.exp((mel - 15) * _STEP))
