"""Small audio files in all formats that are read."""

from __future__ import annotations

import io

import av
import numpy as np
import soundfile

NOISE = np.random.default_rng(0).normal(0, 0.1, (2, 44_100)).astype(np.float32)


def written(samples: np.ndarray, rate: int = 44_100, form: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    """Return samples `[n]` or `[n, channels]` as a file written by soundfile."""
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=form, subtype=subtype)
    return out.getvalue()


def muxed(form: str, codec: str, count: int, rate: int, layout: str = "stereo", **options: str) -> bytes:
    """Return the first `count` samples of NOISE in a container."""
    out = io.BytesIO()
    samples = np.ascontiguousarray(NOISE[: 2 if layout == "stereo" else 1, :count])
    with av.open(out, "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate = rate
        fit = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        for piece in [*fit.resample(frame), *fit.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return out.getvalue()


FILES = {
    "wav": lambda n: written(NOISE[:, :n].T, subtype="PCM_24"),
    "flac": lambda n: written(NOISE[:, :n].T, form="FLAC", subtype=None),
    "aiff": lambda n: written(NOISE[:, :n].T, form="AIFF", subtype="PCM_16"),
    "vorbis": lambda n: written(NOISE[:, :n].T, form="OGG", subtype="VORBIS"),
    "opus": lambda n: written(NOISE[:, :n].T, 48_000, "OGG", "OPUS"),
    "mp3": lambda n: written(NOISE[:, :n].T, form="MP3", subtype=None),
    "mp3 of unknown length": lambda n: muxed("mp3", "libmp3lame", n, 44_100, write_xing="0"),
    "m4a": lambda n: muxed("ipod", "aac", n, 16_000),
    "mp4, alac": lambda n: muxed("mp4", "alac", n, 44_100),
    "mov, pcm": lambda n: muxed("mov", "pcm_s24be", n, 44_100),
    "webm": lambda n: muxed("webm", "libopus", n, 48_000, "mono"),
    "mkv, aac": lambda n: muxed("matroska", "aac", n, 44_100),
    "aac": lambda n: muxed("adts", "aac", n, 44_100),
}
"""Writes the first samples of NOISE, at most 44,100, to a file of each format."""
