"""Read an audio track of a container with PyAV. The times of packets decide where its sound is; see `Timeline`."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...callers.errors import InputError
from .audio_track import choose_track, describe
from .container import open_container
from .formats import wrong_format_error
from .mixing import to_float
from .policy import AudioSelection, DecodeClock, MediaPolicy
from .timeline import Timeline

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet

Array = np.ndarray[Any, Any]
Warn = Callable[[str], object]
# without playlists and other formats that open files
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac,mp3,flac,ogg,wav,aiff,caf,asf,amr,avi,flv,mpegts,mpeg,ac3,eac3,dts,dtshd,truehd,mlp,"
    "au,w64,voc,wv,tta,ape,tak,shn,mpc,mpc8,osq,qoa,rm,ivr,nut,mxf,gxf,oma,wtv,swf,spdif,ircam,sox,iff,wve,qcp,sbc,dsf,xwma,loas,"
    "amrnb,amrwb,sds,pvf,paf,nistsphere,avr,mmf,rso,adx,ast,smjpeg,roq,wsaud,kvag,apm,alp,argo_asf,aptx,aptx_hd,dss,act,aa,vqf,"
    "s337m,dv,rsd,hcom,ilbc,gsm,g723_1"
)
_TS_DISCONT = 0x200  # flag of formats whose times may jump, as at the joints of MPEG-TS recordings
_TIMED = ("mov,mp4", "matroska", "ogg", "asf", "flv", "mpegts", "mpeg", "nut", "rm", "ivr", "wtv", "gxf")  # packets have times
_LATEST_FRAME = 1.0  # seconds that a decoder may hold its first frame back
_OWN_ZERO = ("mov,mp4", "matroska")  # formats whose times count from a zero that the file defines
_LATEST_START = 600.0  # seconds; a file that begins later is a piece of a stream, whose times count from its start
_BLOCK = 1 << 18  # samples of silence at a time
_FIXED = frozenset(("aac", "mp3", "mp3float", "mp2", "mp2float", "ac3"))  # codecs whose packets all have `frame_size` samples
_LOSSLESS = ("pcm_", "flac", "alac", "tta", "wavpack", "ape")  # codecs whose packets last as long as their header says
_MOST_OTHER_TRACKS = 8  # that are searched for sound if the chosen one is silent
_SILENT, _SOUNDS = 1e-3, 1e-2  # largest sample of a silent track, and of one with sound
# Length of a frame in 1/8 ms, by configuration number.
_OPUS_FRAMES = (80, 160, 320, 480) * 3 + (80, 160) * 2 + (20, 40, 80, 160) * 4


class AudioBlock(NamedTuple):
    """Samples `[channels, n]` at `rate` hertz, floating point or PCM integers."""

    samples: Array
    rate: float


@dataclass(frozen=True)
class AudioHeader:
    """`rate` in hertz, `num_samples` of one channel; an estimate if not `exact`."""

    rate: float
    num_samples: int
    exact: bool


@dataclass(frozen=True)
class TrackReader:
    """Reads the chosen track of an encoded file.

    Args:
        from_first_frame: the time of the first video frame is zero, not that of the container.
        clock: checked at every packet while blocks are read; None: the caller checks the time.
    """

    data: bytes
    sound: AudioSelection
    policy: MediaPolicy
    warn: Warn
    from_first_frame: bool = False
    clock: DecodeClock | None = None

    def header(self) -> AudioHeader:
        """Read rate and length from the packets.

        Raises:
            InputError: the format cannot be read, or the file has no audio.
        """
        with self._open() as (container, stream):
            timeline = self._timeline(container, lambda text: None)
            count = _PacketCounter(stream, timeline, container.format.name.startswith(_TIMED))
            for packet in _packets(container, stream):
                if packet.size and packet.is_discard:
                    count.discard(packet)
                elif packet.size:
                    count.add(packet)
            return count.header(exact=not self.from_first_frame)  # a stream of a closed container cannot be read

    def blocks(self) -> Iterator[AudioBlock]:
        """Yield the samples, with silence where the container has none.

        Raises:
            InputError: the file is broken. The samples before the fault were yielded.
        """
        with self._open() as (container, stream):
            timeline = self._timeline(container, self.warn)
            skipped = 0
            for frame, time in self._frames(container, stream):
                rate, block = frame.sample_rate, _samples(frame)
                gap = round(timeline.gap(time) * rate)
                for start in range(0, gap, _BLOCK):
                    yield AudioBlock(np.zeros((len(block), min(_BLOCK, gap - start)), np.float32), rate)
                timeline.add(block.shape[1] / rate)
                skipped += max(0, -gap) if self.from_first_frame else 0
                used = block[:, skipped:]
                skipped -= block.shape[1] - used.shape[1]
                if used.size:
                    yield AudioBlock(used, rate)

    def other_sound(self, clock: DecodeClock) -> str | None:
        """Return a warning if another track has sound. For a track that is silent.

        None: the first `_MOST_OTHER_TRACKS` others are silent, or the time of the clock ends before one with sound is reached.
        """
        with self._open() as (container, stream):
            tracks, chosen = list(container.streams.audio), container.streams.audio.index(stream)
            count, names = len(tracks), describe(tracks)
        others = [number for number in range(count) if number != chosen]
        for number in others[:_MOST_OTHER_TRACKS]:
            try:
                has_sound = _has_sound(
                    TrackReader(self.data, AudioSelection(number), self.policy, lambda text: None, clock=clock)
                )
            except InputError as error:
                if error.info.param == "worker_seconds":
                    return None
                continue  # it cannot be decoded
            if has_sound:
                return f"its audio track {chosen} is silent, but track {number} of {names} is not; track= chooses one"
        return None

    @contextmanager
    def _open(self) -> Iterator[tuple[InputContainer, AudioStream]]:
        unknown = wrong_format_error(self.data, "audio")
        with open_container(self.data, FORMATS, unknown) as container:
            yield container, choose_track(container, self.sound.track, self.warn)

    def _timeline(self, container: InputContainer, warn: Warn) -> Timeline:
        jumps = bool(container.format.flags & _TS_DISCONT) and container.format.name != "ogg"
        return Timeline(self._zero(container, warn), jumps, self.policy)

    def _zero(self, container: InputContainer, warn: Warn) -> float:
        """Return the time in the container at which the audio begins."""
        if self.from_first_frame:
            for video in container.streams.video:
                if video.start_time is not None and video.time_base is not None and not _is_picture(video):
                    return float(video.start_time * video.time_base)
        start = max(0.0, (container.start_time or 0) / 1e6)
        if not container.format.name.startswith(_OWN_ZERO):
            return start
        if start <= _LATEST_START:
            return 0.0
        warn(f"its times begin at {start:,.1f} s, as those of a piece of a stream; they are counted from there")
        return start

    def _frames(self, container: InputContainer, stream: AudioStream) -> Iterator[tuple[AudioFrame, float | None]]:
        """Yield frames and their times. A decoder that holds its first frame back gives all frames a later time."""
        import av

        packets = broken = frames = 0
        late, first = 0.0, None
        for packet in _packets(container, stream):
            if self.clock is not None:
                self.clock.check()
            packets += bool(packet.size)
            if first is None and packet.size and not packet.is_discard and packet.pts is not None:
                first = float(packet.pts * packet.time_base) + _skipped(packet)[0] / stream.codec_context.sample_rate
            try:
                decoded = packet.decode()
            except av.error.FFmpegError:
                broken += 1
                continue
            for frame in decoded:
                if not (frame.samples and frame.sample_rate):
                    continue
                time = frame.time if container.format.name.startswith(_TIMED) or not frames else None
                if not frames and not broken and time is not None and first is not None:
                    late = time - first if 0 < time - first < _LATEST_FRAME else 0.0
                frames += 1
                yield frame, None if time is None else time - late
        if broken and not frames:
            raise InputError("it is broken or cut off (none of its packets can be decoded); download or export it again")
        if broken:
            self.warn(f"{broken} of its {packets} packets cannot be decoded and are left out; download or export it again")


def has_audio(data: bytes, policy: MediaPolicy) -> bool:
    """Return whether a video file has a readable audio track."""
    try:
        with TrackReader(data, AudioSelection(), policy, lambda text: None)._open():
            return True
    except InputError:
        return False


def _packets(container: InputContainer, stream: AudioStream) -> Iterator[Packet[AudioStream]]:
    import av

    try:
        yield from container.demux(stream)
    except av.error.FFmpegError as error:
        raise InputError(f"it is broken or cut off ({error.strerror}); download or export it again") from None


def _samples(frame: AudioFrame) -> Array:
    """Return the samples `[channels, n]` of a frame."""
    block = frame.to_ndarray()
    block = block if frame.format.is_planar else block.reshape(-1, frame.layout.nb_channels).T
    return (block / 2.0**63).astype(np.float32) if block.dtype == np.int64 else block


def _has_sound(reader: TrackReader) -> bool:
    """Return whether a track has a sample that is not silent."""
    return any(np.abs(to_float(block.samples)).max(initial=0) > _SOUNDS for block in reader.blocks())


def is_silent(loudest: float) -> bool:
    """Return whether a track with this largest sample is silent."""
    return loudest < _SILENT


def _is_picture(video: Any) -> bool:
    from av.stream import Disposition

    return bool(video.disposition & Disposition.attached_pic)


class _PacketCounter:
    """Counts the samples of a track by its packets."""

    def __init__(self, stream: AudioStream, timeline: Timeline, is_timed: bool) -> None:
        self._stream, self._timeline, self._is_timed = stream, timeline, is_timed
        self._rate = stream.codec_context.sample_rate
        self._total = self._skip = self._packets = self._last = 0
        self._rate_bits = 0
        self._first: float | None = None
        self._end = 0.0
        self._exact = True

    def discard(self, packet: Packet[AudioStream]) -> None:
        """Count a packet that is decoded and dropped whole. What it skips beyond its end is dropped from the next ones."""
        self._skip = max(0, self._skip + _skipped(packet)[0] - _packet_samples(packet, self._stream)[0])

    def add(self, packet: Packet[AudioStream]) -> None:
        samples, sure = _packet_samples(packet, self._stream)
        start, end = _skipped(packet)
        self._packets += 1
        self._last = samples
        rate_bits = _rate_bits(packet, self._stream.codec_context.name)
        self._rate_bits = rate_bits if self._packets == 1 else self._rate_bits
        self._exact = self._exact and sure and rate_bits == self._rate_bits
        time = None if packet.pts is None else float(packet.pts * packet.time_base)
        if time is not None:
            self._first = time if self._first is None else self._first
            self._end = max(self._end, time + float((packet.duration or 0) * packet.time_base))
        self._skip += start
        dropped = min(self._skip, samples)
        self._skip -= dropped
        if samples > dropped:
            is_timed = self._is_timed or not self._total
            self._timeline.gap(None if time is None or not is_timed else time + dropped / self._rate)
        kept = max(0, samples - dropped - end)
        self._timeline.add(kept / self._rate)
        self._total += kept

    def header(self, exact: bool) -> AudioHeader:
        timeline, rate = self._timeline, self._rate
        if self._exact and exact and not timeline.silence_seconds > 1 / rate and not timeline.restarts:
            return AudioHeader(rate, self._total, True)
        samples = self._total + math.ceil(timeline.silence_seconds * rate)
        if not self._exact and not timeline.restarts and self._first is not None:
            tick = float(self._stream.time_base or 0)
            span = math.ceil((self._end - min(self._first, 0.0 if timeline.silence_seconds else self._first) + tick) * rate)
            samples = min(samples, span) if self._end > self._first else samples
        return AudioHeader(rate, max(samples, min(self._packets, 1)), False)


def _packet_samples(packet: Packet[AudioStream], stream: AudioStream) -> tuple[int, bool]:
    """Return the number of samples of a packet, and whether it is exact or an upper bound."""
    codec = stream.codec_context
    if codec.name in ("opus", "libopus"):
        return _opus_samples(bytes(packet), codec.sample_rate), True
    fixed, tick = codec.frame_size or 0, Fraction(packet.time_base or 0) * codec.sample_rate
    lasts = (packet.duration or 0) * tick
    if fixed and codec.name in _FIXED:
        return fixed, lasts - fixed <= tick
    if lasts and tick <= 1 and lasts.denominator == 1:
        return int(lasts), codec.name.startswith(_LOSSLESS)
    return math.ceil(lasts + tick) if lasts or not fixed else fixed, False  # times are rounded to ticks


def _rate_bits(packet: Packet[AudioStream], codec: str) -> int:
    """Return the bits of the sample rate in the header of an ADTS or MPEG audio frame, 0 for other packets."""
    head = bytes(memoryview(packet)[:3]) if packet.size > 2 else b"\0\0\0"
    if head[0] != 0xFF or head[1] < 0xE0:
        return 0
    return head[2] >> 2 & 15 if codec == "aac" else head[1] & 0x18 | head[2] >> 2 & 3 if codec.startswith("mp") else 0


def _opus_samples(packet: bytes, rate: int) -> int:
    """Return the samples of an Opus packet by its TOC byte (RFC 6716, section 3.1): 1, 2 or n frames of 2.5 to 60 ms."""
    kind, code = packet[0] >> 3, packet[0] & 3
    count = (1, 2, 2, packet[1] & 63 if len(packet) > 1 else 0)[code]
    return count * _OPUS_FRAMES[kind] * rate // 8000


def _skipped(packet: Packet[AudioStream]) -> tuple[int, int]:
    """Return the decoded samples of a packet that are dropped: encoder delay at the start, padding at the end."""
    if not packet.has_sidedata("skip_samples"):
        return 0, 0
    raw = bytes(packet.get_sidedata("skip_samples"))
    return struct.unpack_from("<II", raw) if len(raw) >= 8 else (0, 0)
