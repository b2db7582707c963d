"""Audio files whose packets have chosen times and tracks, written with PyAV."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
import pytest

RATE = 48_000
Shift = Callable[[float], float | None]


@dataclass(frozen=True)
class Track:
    """Samples `[n]`. `shift`: time in seconds of what is encoded at a time, or None to leave the packet out."""

    samples: np.ndarray
    codec: str = "libopus"
    language: str = ""
    is_default: bool = False
    shift: Shift = lambda seconds: seconds
    rate: int = RATE


def tone(hertz: float, seconds: float, rate: int = RATE) -> np.ndarray:
    """Return a sine tone."""
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def timed(form: str, *tracks: Track, video: float = 0.0) -> bytes:
    """Return a container with audio tracks, and with a video of this many seconds."""
    for track in tracks:
        if track.codec not in av.codecs_available:
            pytest.skip(f"this PyAV has no {track.codec}")
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        picture = container.add_stream("mpeg4", rate=10) if video else None
        if picture is not None:
            picture.width = picture.height = 64
            picture.pix_fmt = "yuv420p"
        streams = [_add(container, track) for track in tracks]
        packets = []
        if picture is not None:
            for number in range(round(video * 10)):
                frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), number * 9 % 256, np.uint8), format="rgb24")
                packets += picture.encode(frame)
            packets += picture.encode(None)
        for track, stream in zip(tracks, streams, strict=True):
            packets += _encoded(track, stream)
        container.start_encoding()
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            container.mux(packet)
    return out.getvalue()


def _add(container: av.container.OutputContainer, track: Track) -> av.AudioStream:
    stream = container.add_stream(track.codec, rate=track.rate, layout="mono", options={"strict": "-2"})
    if track.language:
        stream.metadata["language"] = track.language
    if track.is_default:
        stream.disposition = av.stream.Disposition.default
    return stream


def _encoded(track: Track, stream: av.AudioStream) -> Sequence[av.Packet]:
    frame = av.AudioFrame.from_ndarray(track.samples[None], format="fltp", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = track.rate, 0, Fraction(1, track.rate)
    fit = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=track.rate)
    packets = []
    for piece in [*fit.resample(frame), *fit.resample(None)]:
        packets += stream.encode(piece)
    kept = []
    for packet in [*packets, *stream.encode(None)]:
        seconds = track.shift(float(packet.pts * packet.time_base))
        if seconds is not None:
            packet.pts = packet.dts = round(seconds / packet.time_base)
            kept.append(packet)
    return kept
