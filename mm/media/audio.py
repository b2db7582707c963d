"""Decode audio in any accepted form to mono samples at the model's sample rate."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, short_repr
from ..hashing import digest
from ..types import MediaHeader
from .audio_files import read_blocks, read_header
from .policy import DecodeClock, MediaPolicy

Array = np.ndarray[Any, Any]
RATE_TOLERANCE = 1e-6  # hertz; closer rates are equal
_SCALES = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}  # of PCM; uint8 has its zero at 128
_LOUDEST = 1e10  # far above any scale of samples; its square is still a float32
_BLOCK = 1 << 18  # samples mixed and resampled at a time
_STEP = 1 << 15  # of a live stream's block


@dataclass(frozen=True)
class _AudioSource:
    """Samples at `rate` hertz in blocks `[channels, n]`; `frames` is their number, or an upper bound if not `exact`."""

    rate: float
    frames: int
    exact: bool
    blocks: Callable[[], Iterator[Array]]


def probe_audio(value: object, rate: float, policy: MediaPolicy) -> MediaHeader:
    """Return a header with the number of samples that `decode_audio` will give. Packets are counted if the file has no length.

    Raises:
        InputError: an error of `decode_audio` that shows in the header.
    """
    audio = _open(value, rate, policy)
    return MediaHeader("audio", samples=_count(audio.frames, audio.rate, rate), exact=audio.exact)


def decode_audio(value: object, rate: float, policy: MediaPolicy, longest: int | None = None) -> Tensor:
    """Return mono float32 `[samples]` at `rate` hertz.

    `value` is an encoded file, `(samples, their rate)`, or samples at `rate`: floats are used as they are, PCM (int16, int32,
    uint8) is scaled to -1..1. If there are two axes, the longer is time (the second if equal); channels are averaged. `n`
    samples at `s` hertz become `ceil(n * rate / s)` by soxr's high quality resampler; equal rates are not resampled.
    `longest`: largest number of samples; None: no limit.

    Raises:
        InputError: another form, a file that cannot be decoded, no samples, values that are not finite, or audio longer
            than the policy or `longest` allows.
    """
    audio, made = _open(value, rate, policy), 0
    samples = np.empty(_count(audio.frames, audio.rate, rate), np.float32)  # pages that stay unused cost nothing
    for piece in _resampled(audio, rate, DecodeClock(policy)):
        end = made + len(piece)
        if longest is not None and end > longest:
            raise InputError(f"it lasts longer than the {longest / rate:g} s that the model takes; cut it into several items")
        samples[made:end] = piece
        made = end
    if not made:
        raise InputError("it holds no samples")
    return torch.from_numpy(samples[:made])


def audio_windows(value: object, rate: float, seconds: float, policy: MediaPolicy) -> Iterator[Tensor]:
    """Yield the samples of `decode_audio` in windows of `seconds` (the last may be shorter), decoded one window at a time.

    Memory is that of a window and a block of the file, however long it is.

    Raises:
        InputError: as in `decode_audio`, at the window where it shows; or `seconds` is out of range.
    """
    if not 0.5 < seconds * rate < math.inf:
        raise InputError(f"a window of {seconds} s holds no sample, or infinitely many; give a positive number of seconds")
    size = round(seconds * rate)
    kept: list[Array] = []
    filled = 0
    clock = DecodeClock(policy)
    for piece in _resampled(_open(value, rate, policy), rate, clock):
        while filled + len(piece) >= size:
            head, piece = piece[: size - filled], piece[size - filled :]
            with clock.paused():
                yield torch.from_numpy(np.concatenate([*kept, head]))
            kept, filled = [], 0
        kept.append(piece)
        filled += len(piece)
    if filled:
        yield torch.from_numpy(np.concatenate(kept))


def audio_blocks(value: object, rate: float, policy: MediaPolicy) -> Generator[Tensor, None, None]:
    """Yield the samples of `decode_audio` in blocks of any length, in constant memory.

    `value` may also be an open file that `is_streamable`. `max_decoded_bytes` and `worker_seconds` do not
    apply: the caller may stop at any block. The length is limited by `max_transcribed_seconds`.

    Raises:
        InputError: as in `decode_audio`, when the block with the fault is reached.
    """
    empty = True
    for piece in _resampled(_open(value, rate, policy, whole=False), rate):
        empty = empty and not len(piece)
        yield torch.from_numpy(piece)
    if empty:
        raise InputError("it holds no samples")


class SampleStream:
    """Converts the blocks of one audio stream to mono float32 samples at `rate` hertz.

    Args:
        own: the rate of the blocks in hertz.

    Raises:
        InputError: `own` is outside the policy's limits.
    """

    def __init__(self, own: float, rate: float, policy: MediaPolicy) -> None:
        check_sample_rate(own, policy)
        self.own, self._rate = own, rate
        self._stream = _resampler(own, rate)
        self._odd = b""  # half a sample at the end of the last bytes

    def convert(self, block: object) -> Generator[None, None, Tensor]:
        """Return the samples that a block completes. Bytes are PCM: int16, little-endian, mono.

        A long block is converted in steps. The generator yields between them, so that the caller can do other work.

        Raises:
            InputError: the block has another form, or values that are not finite. It has no effect then.
        """
        if isinstance(block, bytes | bytearray | memoryview):
            data = self._odd + bytes(block)
            self._odd = data[len(data) // 2 * 2 :]
            samples = np.frombuffer(data, "<i2", len(data) // 2)[None]
        else:
            samples = _channels_first(_array(block))
        if not samples.size:
            return torch.empty(0)
        mono, made = list[Array](), list[Array]()
        for piece in _pieces(samples, _STEP):
            if mono:
                yield
            mono.append(np.ascontiguousarray(to_mono(piece)))
        if self._stream is None:
            return torch.from_numpy(np.concatenate(mono))
        for piece in mono:
            if made:
                yield
            made.append(self._stream.resample_chunk(piece))
        return torch.from_numpy(np.concatenate(made))

    def rest(self) -> Tensor:
        """Return the samples that the resampler still holds. The next block begins another stream."""
        self._odd = b""
        if self._stream is None:
            return torch.empty(0)
        rest = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        self._stream = _resampler(self.own, self._rate)
        return torch.from_numpy(rest)


def hash_audio(value: object) -> str:
    """Return 64 hex digits of the encoded bytes, or of samples with dtype, shape and rate."""
    if isinstance(value, bytes | bytearray | memoryview):
        return digest("sound", "encoded", value)
    samples, rate = _pair(value)
    return digest("sound", "samples", samples if isinstance(samples, Tensor) else _array(samples), rate)


def to_mono(samples: Array) -> Array:
    """Average `[channels, n]` to float32 `[n]`; PCM integers are scaled to -1..1.

    Raises:
        InputError: another dtype, or values that are not finite.
    """
    scale = _SCALES.get(samples.dtype.name)
    if scale is None and samples.dtype.kind != "f":
        known = ", ".join(_SCALES)
        raise InputError(f"samples must be floating point in -1..1 or PCM ({known}), not {samples.dtype}; convert them")
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are refused below
        channels = samples.astype(np.float32, copy=False)
        mono: Array = channels[0] if len(channels) == 1 else sum(channels[1:], start=channels[0]) / np.float32(len(channels))
        if scale is not None:
            mono = (mono - np.float32(128 if samples.dtype == np.uint8 else 0)) / np.float32(scale)
        loudest = np.abs(mono).max(initial=0)
    if not loudest <= _LOUDEST:
        raise InputError("its samples hold NaN, infinite or far too large values; give numbers in about -1..1")
    return mono


def _open(value: object, rate: float, policy: MediaPolicy, whole: bool = True) -> _AudioSource:
    """Read the header and check it against the policy. `whole`: all samples will be held, so `max_decoded_bytes` applies."""
    if isinstance(value, bytes | bytearray | memoryview | io.BufferedReader):
        data = value if isinstance(value, io.BufferedReader) else bytes(value)
        if not data:
            raise InputError("it is empty")
        header = read_header(data)
        audio = _AudioSource(header.rate, header.frames, header.exact, partial(read_blocks, data, header.rate))
    else:
        given, own = _pair(value)
        samples = _channels_first(_array(given))
        audio = _AudioSource(rate if own is None else own, samples.shape[1], True, partial(_pieces, samples))
    check_sample_rate(audio.rate, policy)
    if not audio.frames:
        raise InputError("it holds no samples")
    limit = "max_audio_seconds" if whole else "max_transcribed_seconds"
    seconds, most = audio.frames / audio.rate, getattr(policy, limit)
    if seconds > most:
        raise InputError(f"it lasts {seconds:.1f} s, the limit {limit} is {most:g} s; cut it or raise the limit", param=limit)
    needed = 4 * _count(audio.frames, audio.rate, rate)
    if whole and needed > policy.max_decoded_bytes:
        raise InputError(
            f"its samples at {rate:g} Hz are {needed:,} bytes, the limit max_decoded_bytes is {policy.max_decoded_bytes:,}; "
            "cut it or raise the limit",
            param="max_decoded_bytes",
        )
    return audio


def check_sample_rate(rate: float, policy: MediaPolicy) -> None:
    """Raise InputError for a rate in hertz beyond the limits of a policy."""
    least, highest = policy.min_audio_rate, policy.max_audio_rate
    if not least <= rate <= highest:
        raise InputError(
            f"its sample rate is {rate:g} Hz; it must be from {least:g} to {highest:g} Hz; "
            "resample it, or change min_audio_rate and max_audio_rate",
            param="min_audio_rate" if rate < least else "max_audio_rate",
        )


def _pair(value: object) -> tuple[object, float | None]:
    """Return samples, and their rate if it is given."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float | np.number):
        try:
            return value[0], float(value[1])
        except (OverflowError, TypeError):  # a number too large, or complex
            raise InputError("its sample rate must be a positive number of hertz") from None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], np.ndarray | Tensor) and not _is_samples(value[1]):
        reason = f"its sample rate is {short_repr(value[1])}; give (samples, rate) with a number of hertz, such as 16000"
        raise InputError(reason)
    return value, None


def _is_samples(value: object) -> bool:
    return isinstance(value, np.ndarray | Tensor | list | tuple)


def _array(samples: object) -> Array:
    if isinstance(samples, Tensor):
        if samples.layout is not torch.strided or samples.is_meta or samples.is_quantized:
            raise InputError(f"samples must be a dense tensor, not {samples.layout} on {samples.device}")
        plain = samples.detach().cpu().resolve_neg()
        return plain.float().numpy() if plain.is_floating_point() else plain.resolve_conj().numpy()
    alone = isinstance(samples, list | tuple) and len(samples) == 1 and isinstance(samples[0], int | float | np.number)
    if alone or not isinstance(samples, np.ndarray | list | tuple):
        form = "give bytes, samples, or (samples, rate)"
        what = "single number" if alone else f"value of type {type(samples).__name__}"
        raise InputError(f"a {what} is not a known form of audio; {form}")
    try:
        array = np.asarray(samples)
    except (ValueError, TypeError, RuntimeError):
        raise InputError("its samples must be a list of numbers, or one such list per channel, all of one length") from None
    whole = not isinstance(samples, np.ndarray) and array.dtype.name == "int64"
    return array.astype(np.float32) if whole else array  # integers in a list are not PCM


def _channels_first(samples: Array) -> Array:
    if samples.ndim not in (1, 2):
        raise InputError(f"samples must have 1 or 2 axes (channels and time), not {samples.ndim}")
    if samples.ndim == 1:
        return samples[None]
    return samples.T if samples.shape[0] > samples.shape[1] else samples


def _pieces(samples: Array, values: int = _BLOCK) -> Iterator[Array]:
    """Yield blocks of at most so many values, or of one sample if there are more channels than that."""
    size = max(1, values // max(1, len(samples)))
    for start in range(0, samples.shape[1], size):
        yield samples[:, start : start + size]


def _resampled(audio: _AudioSource, rate: float, clock: DecodeClock | None = None) -> Iterator[Array]:
    """Yield mono float32 pieces at `rate`, `ceil(n * rate / source)` samples in all."""
    stream, taken, made = _resampler(audio.rate, rate), 0, 0
    for block in audio.blocks():
        if clock is not None:
            clock.check()
        piece = to_mono(block)
        taken += len(piece)
        if taken > audio.frames:
            raise InputError(f"it holds more samples than the {audio.frames} that its header or index announces; save it again")
        piece = piece if stream is None else stream.resample_chunk(np.ascontiguousarray(piece))
        made += len(piece)
        yield piece
    if stream is not None:
        rest, due = stream.resample_chunk(np.zeros(0, np.float32), last=True), _count(taken, audio.rate, rate) - made
        yield np.pad(rest[:due], (0, max(0, due - len(rest))))


def _resampler(source: float, target: float) -> Any:
    """Return a resampler, or None for equal rates."""
    if abs(source - target) < RATE_TOLERANCE:
        return None
    import soxr

    return soxr.ResampleStream(source, target, 1, dtype="float32", quality="HQ")


def _count(frames: int, source: float, target: float) -> int:
    return frames if abs(source - target) < RATE_TOLERANCE else math.ceil(frames * target / source)
