"""Decode audio in any accepted form to mono samples at the model's sample rate."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import InputError
from ..hashing import digest
from ..types import MediaHeader
from .audio_container import AudioBlock, AudioHeader, Warn, is_silent
from .audio_files import open_audio
from .mixing import Mixer
from .policy import WHOLE_SOUND, AudioSelection, DecodeClock, MediaPolicy
from .raw_samples import as_array, channels_first, pieces, split_rate
from .resampling import Resampling, make_resampler, resampled_count

Array = np.ndarray[Any, Any]
_log = logging.getLogger("sensorium")
_BLOCK = 1 << 18  # samples mixed and resampled at a time
_STEP = 1 << 15  # of a live stream's block


@dataclass(frozen=True)
class DecodedAudio:
    """Mono float32 `[samples]`, and what the user should know about how they were read.

    `fault`: arguments of the InputError about what follows the samples, if the file is broken there.
    """

    samples: Tensor
    warnings: tuple[str, ...] = ()
    fault: dict[str, Any] | None = None


@dataclass(frozen=True)
class _AudioSource:
    """An audio in blocks. `headers` are rates and lengths of its parts, one after the other."""

    headers: Sequence[AudioHeader]
    blocks: Callable[[], Iterator[AudioBlock]]
    channel: int | str = "mix"
    other_sound: Callable[[DecodeClock], str | None] = lambda clock: None

    @property
    def exact(self) -> bool:
        return all(header.exact for header in self.headers)

    @property
    def seconds(self) -> float:
        return sum(header.num_samples / header.rate for header in self.headers)

    def count(self, rate: float) -> int:
        """Return the number of samples at `rate`. Parts of one rate are resampled together."""
        total, last = 0, list[AudioHeader]()
        for header in (*self.headers, None):
            if last and (header is None or header.rate != last[0].rate):
                total += resampled_count(sum(part.num_samples for part in last), last[0].rate, rate)
                last = []
            if header is not None:
                last.append(header)
        return total


def probe_audio(
    value: object, rate: float, policy: MediaPolicy, sound: AudioSelection = WHOLE_SOUND, from_first_frame: bool = False
) -> MediaHeader:
    """Return a header with the number of samples that `decode_audio` will give. Packets are counted if the file has no length.

    Raises:
        InputError: an error of `decode_audio` that shows in the header.
    """
    audio = _open_held(value, rate, policy, sound, from_first_frame=from_first_frame)
    return MediaHeader("audio", samples=audio.count(rate), exact=audio.exact)


def decode_audio(
    value: object, rate: float, policy: MediaPolicy, longest: int | None = None, sound: AudioSelection = WHOLE_SOUND
) -> Tensor:
    """Return mono float32 `[samples]` at `rate` hertz, and log what the user should know.

    `value` is an encoded file, `(samples, their rate)`, or samples at `rate`: floats are used as they are, PCM (int16, int32,
    uint8) is scaled to -1..1. If there are two axes, the longer is time (the second if equal); channels are averaged. `n`
    samples at `s` hertz become `ceil(n * rate / s)` by soxr's high quality resampler; equal rates are not resampled.
    Times in a container decide where its sound is: see `Timeline`.
    `longest`: largest number of samples; None: no limit.

    Raises:
        InputError: another form, a file that cannot be decoded, no samples, values that are not finite, or audio longer
            than the policy or `longest` allows.
    """
    decoded = decode_with_warnings(value, rate, policy, longest, sound)
    for text in decoded.warnings:
        _log.warning("audio: %s", text)
    return decoded.samples


def decode_with_warnings(
    value: object,
    rate: float,
    policy: MediaPolicy,
    longest: int | None = None,
    sound: AudioSelection = WHOLE_SOUND,
    from_first_frame: bool = False,
    to_fault: bool = False,
) -> DecodedAudio:
    """Do the same as `decode_audio`, and return the warnings.

    `from_first_frame`: the audio of a video begins at its first frame. `to_fault`: if the file is broken after some samples,
    return these and the error as `fault`; limits are still raised.
    """
    warnings = dict[str, None]()
    audio, made = _open_held(value, rate, policy, sound, warnings.setdefault, from_first_frame), 0
    fault: dict[str, Any] | None = None
    samples: Array = np.empty(audio.count(rate), np.float32)  # pages that stay unused cost nothing

    def check_count(count: int) -> None:
        if longest is not None and count > longest:
            raise InputError(f"it lasts longer than the {longest / rate:g} s that the model takes; cut it into several items")
        _check_length(count / rate, 4 * count, rate, policy)

    try:
        for piece in _resampled(audio, rate, policy, check_count, DecodeClock(policy), warnings.setdefault):
            end = made + len(piece)
            if end > len(samples):  # the header gives an estimate
                samples = np.concatenate([samples[:made], np.empty(max(end - made, made // 2), np.float32)])
            samples[made:end] = piece
            made = end
    except InputError as error:
        if not to_fault or not made or error.info.param is not None:
            raise
        fault = error.info.fields()
    if not made:
        raise InputError("it holds no samples")
    return DecodedAudio(torch.from_numpy(samples[:made]), tuple(warnings), fault)


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

    def check_count(count: int) -> None:
        _check_length(count / rate, 4 * count, rate, policy)

    for piece in _resampled(_open_held(value, rate, policy), rate, policy, check_count, clock):
        while filled + len(piece) >= size:
            head, piece = piece[: size - filled], piece[size - filled :]
            with clock.paused():
                yield torch.from_numpy(np.concatenate([*kept, head]))
            kept, filled = [], 0
        kept.append(piece)
        filled += len(piece)
    if filled:
        yield torch.from_numpy(np.concatenate(kept))


def audio_blocks(
    value: object, rate: float, policy: MediaPolicy, sound: AudioSelection = WHOLE_SOUND, warn: Warn | None = None
) -> Generator[Tensor, None, None]:
    """Yield the samples of `decode_audio` in blocks of any length, in constant memory.

    `value` may also be an open file that `is_streamable`. `max_decoded_bytes` and `worker_seconds` do not
    apply: the caller may stop at any block. The length is limited by `max_transcribed_seconds`. `warn` is called with what the
    user should know; the default writes it to the log.

    Raises:
        InputError: as in `decode_audio`, when the block with the fault is reached.
    """
    warn_once, made, limit = _once(warn or _log_warning), 0, policy.max_transcribed_seconds

    def check_count(count: int) -> None:
        if count / rate > limit + 1:
            raise _too_long(count / rate, "max_transcribed_seconds", limit)

    audio = _open(value, rate, policy, sound, warn_once)
    if audio.seconds > limit:
        raise _too_long(audio.seconds, "max_transcribed_seconds", limit)
    for piece in _resampled(audio, rate, policy, check_count, warn=warn_once):
        made += len(piece)
        if len(piece):
            yield torch.from_numpy(piece)
    if not made:
        raise InputError("it holds no samples")


def _log_warning(text: str) -> None:
    _log.warning("audio: %s", text)


def _once(warn: Warn) -> Warn:
    """Return a function that gives each text to `warn` once."""
    texts = set[str]()

    def warn_once(text: str) -> None:
        if text not in texts:
            texts.add(text)
            warn(text)

    return warn_once


class SampleStream:
    """Converts the blocks of one audio stream to mono float32 samples at `rate` hertz.

    Args:
        source_rate: the rate of the blocks in hertz.

    Raises:
        InputError: `source_rate` is outside the policy's limits.
    """

    def __init__(self, source_rate: float, rate: float, policy: MediaPolicy) -> None:
        check_sample_rate(source_rate, policy)
        self.source_rate, self._rate = source_rate, rate
        self._stream = make_resampler(source_rate, rate)
        self._mixer = Mixer(source_rate, warn=_once(_log_warning))
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
            samples = channels_first(as_array(block))
        if not samples.size:
            return torch.empty(0)
        mono, made = list[Array](), list[Array]()
        for piece in pieces(samples, _STEP):
            if mono:
                yield
            mono.append(np.ascontiguousarray(self._mixer.mix(piece)))
        if self._stream is None:
            return torch.from_numpy(np.concatenate(mono))
        for piece in mono:
            if made:
                yield
            made.append(self._stream.resample_chunk(piece))
        return torch.from_numpy(np.concatenate(made))

    def flush(self) -> Tensor:
        """Return the samples that the resampler still holds. The next block begins another stream."""
        self._odd = b""
        if self._stream is None:
            return torch.empty(0)
        rest = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        self._stream = make_resampler(self.source_rate, self._rate)
        return torch.from_numpy(rest)


def hash_audio(value: object) -> str:
    """Return 64 hex digits of the encoded bytes, or of samples with dtype, shape and rate."""
    if isinstance(value, bytes | bytearray | memoryview):
        return digest("sound", "encoded", value)
    samples, rate = split_rate(value)
    return digest("sound", "samples", samples if isinstance(samples, Tensor) else as_array(samples), rate)


def _open(
    value: object,
    rate: float,
    policy: MediaPolicy,
    sound: AudioSelection,
    warn: Callable[[str], object],
    from_first_frame: bool = False,
) -> _AudioSource:
    """Read the header and check its rates against the policy."""
    if isinstance(value, bytes | bytearray | memoryview | io.BufferedReader):
        data = value if isinstance(value, io.BufferedReader) else bytes(value)
        if not data:
            raise InputError("it is empty")
        file = open_audio(data, sound, policy, warn, from_first_frame)
        audio = _AudioSource(file.headers, file.blocks, sound.channel, file.other_sound)
    else:
        array, own_rate = split_rate(value)
        samples = channels_first(as_array(array))
        hertz = rate if own_rate is None else own_rate
        header = AudioHeader(hertz, samples.shape[1], True)
        audio = _AudioSource((header,), lambda: (AudioBlock(piece, hertz) for piece in pieces(samples, _BLOCK)), sound.channel)
    for header in audio.headers:
        check_sample_rate(header.rate, policy)
    if not any(header.num_samples for header in audio.headers):
        raise InputError("it holds no samples")
    return audio


def _open_held(
    value: object,
    rate: float,
    policy: MediaPolicy,
    sound: AudioSelection = WHOLE_SOUND,
    warn: Callable[[str], object] = lambda text: None,
    from_first_frame: bool = False,
) -> _AudioSource:
    """Open an audio whose samples will all be held, so `max_audio_seconds` and `max_decoded_bytes` apply."""
    audio = _open(value, rate, policy, sound, warn, from_first_frame)
    _check_length(audio.seconds, 4 * audio.count(rate), rate, policy)
    return audio


def _check_length(seconds: float, needed: int, rate: float, policy: MediaPolicy) -> None:
    """Raise InputError for an audio of so many seconds and bytes beyond the limits."""
    if seconds > policy.max_audio_seconds:
        raise _too_long(seconds, "max_audio_seconds", policy.max_audio_seconds)
    if needed > policy.max_decoded_bytes:
        raise InputError(
            f"its samples at {rate:g} Hz are {needed:,} bytes, the limit max_decoded_bytes is {policy.max_decoded_bytes:,}; "
            "cut it or raise the limit",
            code="over_limit",
            param="max_decoded_bytes",
            limit=policy.max_decoded_bytes,
            value=needed,
        )


def _too_long(seconds: float, limit: str, most: float) -> InputError:
    reason = f"it lasts {seconds:.1f} s, the limit {limit} is {most:g} s; cut it or raise the limit"
    return InputError(reason, code="over_limit", param=limit, limit=most, value=seconds)


def check_sample_rate(rate: float, policy: MediaPolicy) -> None:
    """Raise InputError for a rate in hertz beyond the limits of a policy."""
    least, highest = policy.min_audio_rate, policy.max_audio_rate
    if not least <= rate <= highest:
        raise InputError(
            f"its sample rate is {rate:g} Hz; it must be from {least:g} to {highest:g} Hz; "
            "resample it, or change min_audio_rate and max_audio_rate",
            code="invalid_value",
            param="min_audio_rate" if rate < least else "max_audio_rate",
        )


def _resampled(
    audio: _AudioSource,
    rate: float,
    policy: MediaPolicy,
    check_count: Callable[[int], None],
    clock: DecodeClock | None = None,
    warn: Callable[[str], object] = lambda text: None,
) -> Iterator[Array]:
    """Yield mono float32 pieces at `rate`. The rate of the source may change at any block.

    Args:
        check_count: called before a block is resampled, with the number of samples up to its end; raises if it is too large.
        clock: None: the time of decoding is not limited.
    """
    source = audio.headers[0].rate
    mixer, resampling = Mixer(source, audio.channel, warn), Resampling(source, rate)
    announced, taken, loudest = sum(header.num_samples for header in audio.headers), 0, 0.0
    before = in_stretch = 0  # samples at `rate` of the stretches before; samples of this one, which has one rate
    for block in audio.blocks():
        if clock is not None:
            clock.check()
        taken += block.samples.shape[1]
        if audio.exact and taken > announced:
            raise InputError(f"it holds more samples than the {announced} that its header or index announces; save it again")
        if block.rate != resampling.source:
            check_sample_rate(block.rate, policy)
            before, in_stretch = before + resampled_count(in_stretch, resampling.source, rate), 0
            yield from (resampling.add(piece) for piece in mixer.flush())
            yield resampling.flush()
            loudest = max(loudest, mixer.loudest)
            mixer, resampling = Mixer(block.rate, audio.channel, warn), Resampling(block.rate, rate)
        in_stretch += block.samples.shape[1]
        check_count(before + resampled_count(in_stretch, block.rate, rate))
        yield from (resampling.add(piece) for piece in mixer.add(block.samples))
    yield from (resampling.add(piece) for piece in mixer.flush())
    yield resampling.flush()
    if is_silent(max(loudest, mixer.loudest)) and (text := audio.other_sound(clock or DecodeClock(policy))):
        warn(text)
