"""Encoded audio files: length from header or packets, and samples block by block.

soundfile reads wav, flac, ogg, opus, aiff, and mp3 whose first frame gives the length; PyAV reads the rest (m4a, mp4, webm,
mp3 and flac of unknown length).
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ..errors import InputError
from .container import check_codec, open_container
from .formats import wrong_format_error
from .policy import MediaPolicy
from .tags import may_have_many_tags

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet

Array = np.ndarray[Any, Any]
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac,mp3,flac,ogg,wav,aiff,caf,asf,amr,avi,flv,mpegts"  # no playlists
_BLOCK = 1 << 18  # samples of all channels read at a time
_UNKNOWN = 1 << 60  # libsndfile returns a larger length if the file has none
# Length of a frame in 1/8 ms, by configuration number.
_OPUS_FRAMES = (80, 160, 320, 480) * 3 + (80, 160) * 2 + (20, 40, 80, 160) * 4
_TAG_WITHIN = 1 << 16  # bytes searched for the frame with the length of an mp3


@dataclass(frozen=True)
class AudioHeader:
    """`rate` in hertz, `frames` samples of one channel; an upper bound if not `exact`."""

    rate: int
    frames: int
    exact: bool


def read_header(data: bytes | BinaryIO) -> AudioHeader:
    """Read rate and length from the header or, if it has no length, from the packets.

    A truncated file may still have its whole length in the header; decoding then gives fewer samples, or an error.

    Raises:
        InputError: the format cannot be read, or the file has no audio.
    """
    file = _soundfile(data)
    if file is not None:
        with file:
            return AudioHeader(file.samplerate, file.frames, True)
    assert isinstance(data, bytes)
    with _container(data) as (container, stream):
        rate, skipped, total, exact = stream.codec_context.sample_rate, 0, 0, True
        for packet in _packets(container, stream):
            frames, sure = _packet_frames(packet, stream)
            total, skipped, exact = total + frames, skipped + _skipped(packet), exact and sure
    return AudioHeader(rate, max(0, total - skipped), exact)


def has_audio(data: bytes, policy: MediaPolicy) -> bool:
    """Return whether a video file has a readable audio track. `policy` is unused (codec functions take one)."""
    try:
        with _container(data):
            return True
    except InputError:
        return False


def is_slow(data: bytes, kind: str) -> bool:
    """Return whether reading the header of a video or audio may take long. soundfile reads every header fast."""
    return may_have_many_tags(data) and (kind != "audio" or _soundfile(data) is None)


def is_streamable(file: BinaryIO) -> bool:
    """Return whether an open file can be read in blocks, instead of as a whole."""
    found = _soundfile(file)
    if found is not None:
        found.close()
    return found is not None


def read_blocks(data: bytes | BinaryIO, rate: int) -> Iterator[Array]:
    """Yield samples `[channels, n]`, float32 or the integers of the file, block by block.

    `data`: the file's bytes, or an open file that `is_streamable`.

    Raises:
        InputError: the file is broken, or its rate changes from `rate`. The samples before the fault were yielded.
    """
    file = _soundfile(data)
    if file is None:
        assert isinstance(data, bytes)
        yield from _container_blocks(data, rate)
        return
    import soundfile

    with file:
        size = max(1, _BLOCK // file.channels)
        while True:
            block, start = np.empty((size, file.channels), np.float32), file.tell()
            try:
                block = file.read(out=block)
            except (soundfile.LibsndfileError, RuntimeError) as error:
                if file.tell() > start:
                    yield block[: file.tell() - start].T
                reason = getattr(error, "error_string", None) or "libsndfile gives no reason"
                raise InputError(f"it is broken or cut off ({reason}); download or export it again") from None
            if not len(block):
                return
            yield block.T


class _Bytes(io.BytesIO):
    """A file that allows seeks before its start, which damaged headers cause; libsndfile would print an exception."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return super().seek(max(0, offset) if whence == 0 else offset, whence)


class _OpenFile(io.BufferedReader):
    """An open file that, like `_Bytes`, allows seeks to before its start."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return super().seek(max(0, offset) if whence == 0 else offset, whence)


def _soundfile(data: bytes | BinaryIO) -> Any:
    """Open with soundfile; None if it cannot, or if it does not know the length."""
    import soundfile

    try:
        if isinstance(data, bytes):
            file, head = soundfile.SoundFile(_Bytes(data)), data[:_TAG_WITHIN]
        else:
            head = os.pread(data.fileno(), _TAG_WITHIN, 0)
            os.lseek(data.fileno(), 0, os.SEEK_SET)
            file = soundfile.SoundFile(_OpenFile(io.FileIO(data.fileno(), closefd=False)))
    except (soundfile.LibsndfileError, RuntimeError, TypeError):  # TypeError: headerless data
        return None
    has_length = file.format != "MP3" or b"Xing" in head or b"Info" in head
    if has_length and 0 <= file.frames < _UNKNOWN and file.samplerate > 0:
        return file
    file.close()
    return None


@contextmanager
def _container(data: bytes) -> Iterator[tuple[InputContainer, AudioStream]]:
    with open_container(data, _FORMATS, wrong_format_error(data, "audio")) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            raise InputError("it holds no audio")
        if stream.codec_context is None or not stream.codec_context.sample_rate:
            raise InputError("its codec is not supported; convert it to WAV or FLAC")
        check_codec(stream.codec_context.name)
        yield container, stream


def _packets(container: InputContainer, stream: AudioStream) -> Iterator[Packet[AudioStream]]:
    """Yield packets that hold data."""
    import av

    try:
        for packet in container.demux(stream):
            if packet.size:
                yield packet
    except av.error.FFmpegError as error:
        raise InputError(f"it is broken or cut off ({error.strerror}); download or export it again") from None


def _container_blocks(data: bytes, rate: int) -> Iterator[Array]:
    import av

    with _container(data) as (container, stream):
        try:
            for frame in container.decode(stream):
                if frame.sample_rate != rate:
                    raise InputError(
                        f"its sample rate changes from {rate} to {frame.sample_rate} hertz; resample it to one rate"
                    )
                block = frame.to_ndarray()
                yield block if frame.format.is_planar else block.reshape(-1, len(frame.layout.channels)).T
        except av.error.FFmpegError as error:
            raise InputError(f"it is broken or cut off ({error.strerror}); download or export it again") from None


def _packet_frames(packet: Packet[AudioStream], stream: AudioStream) -> tuple[int, bool]:
    """Return the number of samples of a packet, and whether it is exact or an upper bound."""
    codec = stream.codec_context
    if codec.name in ("opus", "libopus"):
        return _opus_frames(bytes(packet), codec.sample_rate), True
    fixed, tick = codec.frame_size or 0, Fraction(packet.time_base or 0) * codec.sample_rate
    lasts = (packet.duration or 0) * tick
    if tick.denominator == 1 or (lasts and lasts.denominator == 1):
        return max(fixed, int(lasts)), bool(fixed or lasts)
    if fixed and lasts - tick <= fixed:
        return fixed, True
    return math.ceil(lasts + tick), False  # times are rounded to ticks


def _opus_frames(packet: bytes, rate: int) -> int:
    """Return the samples of an Opus packet by its TOC byte (RFC 6716, section 3.1): 1, 2 or n frames of 2.5 to 60 ms."""
    kind, code = packet[0] >> 3, packet[0] & 3
    count = (1, 2, 2, packet[1] & 63 if len(packet) > 1 else 0)[code]
    return count * _OPUS_FRAMES[kind] * rate // 8000


def _skipped(packet: Packet[AudioStream]) -> int:
    """Return the decoded samples of a packet that are dropped: encoder delay at the start, padding at the end."""
    if not packet.has_sidedata("skip_samples"):
        return 0
    raw = bytes(packet.get_sidedata("skip_samples"))
    return sum(struct.unpack_from("<II", raw)) if len(raw) >= 8 else 0
