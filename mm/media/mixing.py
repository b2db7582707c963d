"""Mix the channels of audio to one: their mean, or one channel if they hide each other or the caller chooses one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import fft  # imported now: a sandboxed worker cannot import later

from ...callers.errors import InputError

Array = np.ndarray[Any, Any]
_SCALES = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}  # of PCM; uint8 has its zero at 128
_LARGEST = 64.0  # absolute value: damaged lossy files reach some tens, 16-bit integers given as floats are far above
_WINDOW = 1.0  # seconds over which channels are compared
_SHORTEST = 0.25  # seconds; the rest of a stream that is shorter than this is mixed as the second before it
_CANCELS = 0.25  # energy of the mean, by that of the mean of channels without any relation
_STILL_CANCELS = 0.5  # the same after a second in which they cancelled: speech may be weaker than common noise for a while
_SPEECH = 200.0  # hertz from which on channels are compared: offsets, rumble and hum lie below
_COARSE = 8000.0  # hertz at which they are compared, at least
_PRESENT = 0.25  # share of the loudest channel's energy that another one has at least if it is to be chosen
_OFFSET = 0.05  # constant part of the mean that may come from one broken channel
_QUIET = 1e-8  # energy of a sample at -80 dB
_BETTER = 0.75  # share of a channel's energy by which it is better than the one in use if it takes its place
SIDES = {"left": 0, "right": 1}
MIX = "mix"


class Mixer:
    """Turns blocks `[channels, n]` of one stream into mono float32.

    Channels are averaged. Over a second in which they are out of phase, so that their mean loses most of what each has above
    200 Hz, or in which one has a large offset, the best channel is used, and `warn` is called. Seconds are counted from the
    start, so that the result does not depend on the blocks.

    Args:
        channel: number of a channel, "left", "right", or "mix".
    """

    def __init__(self, rate: float, channel: int | str = MIX, warn: Callable[[str], object] = lambda text: None) -> None:
        self._channel, self._warn, self._rate = channel, warn, rate
        self._window = max(1, round(_WINDOW * rate))
        self._kept: list[Array] = []
        self._count = 0
        self._shortest = round(_SHORTEST * rate)
        self._best: int | None = None  # the channel in use where the mean is not
        self._fault: str | None = None  # why the mean was not used in the last second, "" if it was; None before the first
        self.loudest = 0.0
        """Largest absolute value of a sample so far."""

    def add(self, block: Array) -> Iterator[Array]:
        """Yield the mono samples that a block completes.

        Raises:
            InputError: the dtype is neither floating point nor PCM, values are not finite or not in about -1..1, or there is
                no such channel.
        """
        if self._kept and len(self._kept[0]) != len(block):
            yield from self.flush()
        if len(block) == 1 or self._channel != MIX:
            yield self.mix(block)
            return
        self._kept.append(to_float(block))
        self._count += block.shape[1]
        if self._count < self._window:
            return
        joined = self._kept[0] if len(self._kept) == 1 else np.concatenate(self._kept, 1)
        whole = self._count // self._window * self._window
        for start in range(0, whole, self._window):
            yield self.mix(joined[:, start : start + self._window])
        self._kept, self._count = [joined[:, whole:]], self._count - whole

    def flush(self) -> Iterator[Array]:
        """Yield the samples since the last whole second. The next block may have another number of channels."""
        kept, self._kept, count, self._count = self._kept, [], self._count, 0
        if count:
            yield self.mix(np.concatenate(kept, 1))

    def mix(self, block: Array) -> Array:
        """Return the mono samples of one stretch of time."""
        channels = to_float(block)
        mono: Array
        if self._channel != MIX:
            mono = channels[self._chosen(len(channels))]
        elif len(channels) == 1:
            mono = channels[0]
        else:
            mono = self._mean(channels)
        self.loudest = max(self.loudest, float(np.abs(mono).max(initial=0)))
        return mono

    def _chosen(self, count: int) -> int:
        number = SIDES.get(self._channel, -1) if isinstance(self._channel, str) else self._channel
        if count == 1 and isinstance(self._channel, str):
            return 0  # both sides of a mono track
        if not 0 <= number < count:
            choices = "0" if count == 1 else "0 or 1" if count == 2 else f"0 to {count - 1}"
            channels = "1 channel" if count == 1 else f"{count} channels"
            raise InputError(f"channel={number}, but the audio has {channels}; give {choices}", param="channel")
        return number

    def _mean(self, channels: Array) -> Array:
        count = len(channels)
        mean: Array = sum(channels[1:], start=channels[0]) / np.float32(count)
        if float(np.square(channels).sum()) <= _QUIET * channels.size:
            return mean
        if self._fault is None or channels.shape[1] >= self._shortest:
            self._fault = self._judge(channels)
        if not self._fault or self._best is None or self._best >= count:
            return mean
        name = _name(self._best, count)
        self._warn(f"{self._fault}, so channel {name} is used where they do; channel= chooses one")
        best: Array = channels[self._best]
        return best

    def _judge(self, channels: Array) -> str:
        """Return why the mean of channels must not be used, or "". Choose the channel that is used then."""
        levels = _levels(channels, self._rate)
        count, speech, offset = len(channels), levels.speech, abs(float(levels.offsets.mean()))
        quality = np.where(speech >= _PRESENT * speech.max(), 2 * speech - levels.whole, -np.inf)
        best = int(quality.argmax())
        fault = ""
        limit = _STILL_CANCELS if self._fault else _CANCELS
        if levels.speech_of_mean < limit * speech.sum() / count**2:
            fault = "its channels are out of phase and cancel each other out"
        elif (
            channels.shape[1] >= self._shortest
            and offset > _OFFSET
            and offset**2 > levels.speech_of_mean
            and abs(levels.offsets[best]) < offset / 2
        ):
            fault = "its channels hide each other by a constant offset"
        if self._best is None or self._best >= count or quality[best] - quality[self._best] > _BETTER * speech[best]:
            self._best = best if fault else self._best
        return fault


@dataclass(frozen=True)
class _Levels:
    """Energies per sample: `whole` of each channel, `speech` of what it has above 200 Hz. `offsets`: its constant part."""

    whole: Array
    speech: Array
    speech_of_mean: float
    offsets: Array


def _levels(channels: Array, rate: float) -> _Levels:
    """Return the levels of channels `[channels, n]` at a low rate. If all is below 200 Hz, `speech` is all but the offset."""
    step = max(1, int(rate / _COARSE))
    length = max(1, channels.shape[1] // step)
    coarse = channels[:, : length * step].reshape(len(channels), length, -1).mean(2, dtype=np.float64)  # [channels, length]
    offsets = coarse.mean(1)
    spectrum = fft.rfft(coarse - offsets[:, None]) * (2**0.5 / length)  # [channels, bins]
    high = spectrum[:, int(_SPEECH * length * step / rate) :]
    if np.square(np.abs(high)).sum() > _QUIET * len(channels):
        spectrum = high
    speech = np.square(np.abs(spectrum)).sum(1)
    mean = float(np.square(np.abs(spectrum.mean(0))).sum())
    return _Levels(np.square(coarse).mean(1), speech, mean, offsets)


def _name(channel: int, count: int) -> str:
    """Return the number of a channel, and its side if there are two."""
    side = {number: name for name, number in SIDES.items()}.get(channel) if count == 2 else None
    return str(channel) if side is None else f"{channel} ({side})"


def to_float(samples: Array) -> Array:
    """Return samples as float32; PCM integers are scaled to -1..1.

    Raises:
        InputError: another dtype, or values that are not finite or not in about -1..1, such as integers given as floats.
    """
    scale = _SCALES.get(samples.dtype.name)
    if scale is None and samples.dtype.kind != "f":
        dtypes = ", ".join(_SCALES)
        raise InputError(f"samples must be floating point in -1..1 or PCM ({dtypes}), not {samples.dtype}; convert them")
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are refused below
        channels: Array = samples.astype(np.float32, copy=False)
        if scale is not None:
            channels = (channels - np.float32(128 if samples.dtype == np.uint8 else 0)) / np.float32(scale)
        loudest = np.abs(channels).max(initial=0)
    if not np.isfinite(loudest):
        raise InputError("its samples hold NaN, infinite or far too large values; give numbers in about -1..1")
    if loudest > _LARGEST:
        how = "divide 16-bit values by 32768, or give them as int16"
        raise InputError(f"its samples reach {loudest:,.3f}, but floating-point samples must be in about -1..1; {how}")
    return channels
