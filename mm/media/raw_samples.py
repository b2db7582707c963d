"""Samples that callers give as arrays, tensors or lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import InputError, equals_one_of, hint, short_repr

Array = np.ndarray[Any, Any]


def split_rate(value: object) -> tuple[object, float | None]:
    """Return samples, and their rate if it is given."""
    if is_rate_first(value):
        raise InputError("it is (rate, samples); give (samples, rate)")
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float | np.number):
        try:
            return value[0], float(value[1])
        except (OverflowError, TypeError):  # a number too large, or complex
            raise InputError("its sample rate must be a positive number of hertz") from None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], np.ndarray | Tensor) and not _is_samples(value[1]):
        reason = f"its sample rate is {short_repr(value[1])}; give (samples, rate) with a number of hertz, such as 16000"
        raise InputError(reason)
    return value, None


def is_rate_first(value: object) -> bool:
    """Return whether a value is `(rate, samples)`, the order of `scipy.io.wavfile.read` and Gradio."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], int | float | np.number) and isinstance(value[1], np.ndarray | Tensor)


def _is_samples(value: object) -> bool:
    return isinstance(value, np.ndarray | Tensor | list | tuple)


def as_array(samples: object) -> Array:
    if isinstance(samples, Tensor):
        if samples.layout is not torch.strided or samples.is_meta or samples.is_quantized:
            raise InputError(f"samples must be a dense tensor, not {samples.layout} on {samples.device}")
        plain = samples.detach().cpu().resolve_neg()
        return plain.float().numpy() if plain.is_floating_point() else plain.resolve_conj().numpy()
    if isinstance(samples, Mapping):
        raise InputError(_wrong_keys(samples))
    alone = isinstance(samples, list | tuple) and len(samples) == 1 and isinstance(samples[0], int | float | np.number)
    if alone or not isinstance(samples, np.ndarray | list | tuple):
        advice = "give bytes, samples, or (samples, rate)"
        what = "single number" if alone else f"value of type {type(samples).__name__}"
        raise InputError(f"a {what} is not a known form of audio; {advice}")
    try:
        array = np.asarray(samples)
    except (ValueError, TypeError, RuntimeError):
        raise InputError("its samples must be a list of numbers, or one such list per channel, all of one length") from None
    whole = not isinstance(samples, np.ndarray) and array.dtype.name == "int64"
    return array.astype(np.float32) if whole else array  # integers in a list are not PCM


def _wrong_keys(item: Mapping[object, object]) -> str:
    """Return what is wrong with the keys of a mapping that is no item of Hugging Face libraries."""
    known = ("array", "sampling_rate", "path", "raw", "bytes")
    unknown = next((key for key in item if not equals_one_of(key, known)), None)
    if unknown is not None:
        return f"it has the unknown key {short_repr(unknown)}; {hint(unknown, known)}"
    return f'it has the keys {", ".join(map(str, item)) or "none"}; give "array" and "sampling_rate" (hertz), or "bytes"'


def channels_first(samples: Array) -> Array:
    if samples.ndim not in (1, 2):
        raise InputError(f"samples must have 1 or 2 axes (channels and time), not {samples.ndim}")
    if samples.ndim == 1:
        return samples[None]
    return samples.T if samples.shape[0] > samples.shape[1] else samples


def pieces(samples: Array, values: int) -> Iterator[Array]:
    """Yield blocks of at most this many values, or of one sample if it has more channels than that."""
    size = max(1, values // max(1, len(samples)))
    for start in range(0, samples.shape[1], size):
        yield samples[:, start : start + size]
