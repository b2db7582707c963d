"""Small videos in many codecs and containers, encoded with PyAV."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from fractions import Fraction
from functools import cache

import av
import numpy as np
import pytest

CLIPS = {  # name: codec, container, options
    "h264-mp4": ("libx264", "mp4", {"g": "12", "bf": "3"}),
    "h264-open-gop-mkv": ("libx264", "matroska", {"g": "12", "x264-params": "open-gop=1:keyint=12:bframes=4:b-pyramid=normal"}),
    "h264-one-gop-mp4": ("libx264", "mp4", {"g": "250", "bf": "8"}),
    "h264-refresh-mkv": ("libx264", "matroska", {"x264-params": "intra-refresh=1:keyint=15"}),
    "h264-ts": ("libx264", "mpegts", {"g": "12"}),
    "h264-plain-avi": ("libx264", "avi", {"g": "12", "bf": "0"}),
    "hevc-mp4": ("libx265", "mp4", {"x265-params": "log-level=none:keyint=12:open-gop=1:bframes=4"}),
    "vp9-webm": ("libvpx-vp9", "webm", {"g": "12"}),
    "vp8-webm": ("libvpx", "webm", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "av1-mp4": ("libsvtav1", "mp4", {"g": "12"}),
    "mpeg4-mp4": ("mpeg4", "mp4", {"g": "12", "bf": "2"}),
    "mpeg2-ps": ("mpeg2video", "mpeg", {"g": "12", "bf": "2"}),
    "mjpeg-avi": ("mjpeg", "avi", {}),
    "gif": ("gif", "gif", {}),
}
UNTIMED = {  # their packets have no reliable presentation timestamps
    "h264-avi": ("libx264", "avi", {"g": "12", "bf": "3"}),
    "mpeg4-avi": ("mpeg4", "avi", {"g": "12", "bf": "2"}),
    "h264-raw": ("libx264", "h264", {"g": "12"}),
}
PIXELS = {"mjpeg": "yuvj420p", "gif": "rgb8"}
REAL_TIME = ("libsvtav1",)
"""Encoders that give the calling thread and all of its later threads a real-time priority if the user is root."""
NOBODY = 65534  # a user without that right


def encode(codec, container, options=None, *args, **kwargs) -> bytes:
    """Encode as `encode_here` does; with an encoder of REAL_TIME in a child process, as another user."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    if codec not in REAL_TIME:
        return encode_here(codec, container, options, *args, **kwargs)
    call = json.dumps([[codec, container, options, *args], kwargs])
    return subprocess.run([sys.executable, __file__], input=call.encode(), stdout=subprocess.PIPE, check=True).stdout


def encode_here(codec, container, options=None, count=40, size=(64, 64), stamps=None, rotation=0, muxer=None) -> bytes:
    """Encode `count` moving noisy frames at 10 fps, or at `stamps` in milliseconds."""
    noise, buffer = np.random.default_rng(1), io.BytesIO()
    with av.open(buffer, "w", format=container, options=muxer or {}) as output:
        stream = output.add_stream(codec, rate=10, options=options or {})
        stream.height, stream.width, stream.pix_fmt = *size, PIXELS.get(codec, "yuv420p")
        if stamps:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        rows, columns = np.mgrid[: size[0], : size[1]]
        for i in range(count):
            pixels = np.stack([rows * 3 + i * 5, columns * 2 + i * 7, rows + columns + i * 3], -1) % 200
            pixels = pixels.astype(np.uint8) + noise.integers(0, 50, pixels.shape, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if stamps:
                frame.pts, frame.time_base = stamps[i], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


@cache
def clip(name: str) -> bytes:
    """Make a video of 40 frames of 64x64, 4 s."""
    return encode(*(CLIPS | UNTIMED)[name])


def plainly(data: bytes) -> tuple[np.ndarray, list[float]]:
    """Decode all frames and their timestamps with plain PyAV."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    times = [0.0 if f.pts is None else float((f.pts - frames[0].pts) * f.time_base) for f in frames]
    return np.stack([f.to_ndarray(format="rgb24") for f in frames]), times


def encode_for_parent() -> None:
    """Write the video of the arguments on stdin to stdout."""
    args, kwargs = json.load(sys.stdin)
    np.random.default_rng(0)  # the other user may read no more modules
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # a container may forbid it
            os.seteuid(NOBODY)
    sys.stdout.buffer.write(encode_here(*args, **kwargs))
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


if __name__ == "__main__":
    encode_for_parent()
