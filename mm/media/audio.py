"""One sound in any form a caller may give, as mono samples at the rate a model wants. Knows no family and no network."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, MediaError
from ..hashing import digest
from ..types import MediaHeader
from .policy import MediaPolicy

RATE_TOLERANCE = 1e-6  # hertz; closer rates are the same


def probe_audio(value: object, rate: int, policy: MediaPolicy) -> MediaHeader:
    return MediaHeader("audio", samples=len(decode_audio(value, rate, policy)))


def decode_audio(value: object, rate: int, policy: MediaPolicy) -> Tensor:
    samples, source = _decode(value)
    return torch.from_numpy(resample(to_mono(samples), source, rate))


def hash_audio(value: object) -> str:
    return digest("sound", value)


def to_mono(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mean over channels, float32 `[n]`. Of two axes the longer is time; the first when they are equal is channels."""
    if samples.ndim == 1:
        return samples.astype(np.float32, copy=False)
    if samples.ndim != 2:
        raise InputError(f"samples have 1 or 2 axes (channels and time), not {samples.ndim}")
    axis = 1 if samples.shape[0] > samples.shape[1] else 0
    mean: np.ndarray[Any, Any] = samples.mean(axis=axis, dtype=np.float32)
    return mean


def resample(samples: np.ndarray[Any, Any], source: float, target: float) -> np.ndarray[Any, Any]:
    """Samples `[n]` at `source` hertz as float32 `[ceil(n * target / source)]` at `target`; soxr's high quality."""
    if abs(source - target) < RATE_TOLERANCE:
        return samples
    import soxr

    length = math.ceil(len(samples) * target / source)
    out: np.ndarray[Any, Any] = soxr.resample(samples, source, target, quality="HQ")[:length]
    return np.pad(out, (0, length - len(out)))


def _decode(value: object) -> tuple[np.ndarray[Any, Any], float]:
    if isinstance(value, tuple) and len(value) == 2:
        samples = np.asarray(value[0].detach().cpu() if isinstance(value[0], Tensor) else value[0])
        if samples.dtype.kind != "f":
            raise InputError(f"samples are floating point in -1..1, not {samples.dtype}")
        source = float(value[1])
        if not source > 0:
            raise InputError(f"a sample rate is a positive number of hertz, not {value[1]}")
    else:
        samples, source = _decode_file(value)
    if not samples.size:
        raise InputError("it holds no samples")
    return samples, source


def _decode_file(data: bytes) -> tuple[np.ndarray[Any, Any], float]:
    import soundfile

    try:
        samples, source = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise InputError(f"it cannot be decoded ({getattr(error, 'error_string', error)})") from None
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1), float(source)
