"""Files with many tags are found by their bytes, and read in a worker."""

from __future__ import annotations

import io
import struct
from unittest import mock

import numpy as np
import pytest
import soundfile
from clips import clip
from sensorium.callers.errors import InputError, MediaError
from sensorium.mm.media import gate
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.media.tags import may_have_many_tags
from sensorium.mm.parse import MediaSource

PADDING = bytes(1 << 17)


def element(name: bytes, *parts: bytes) -> bytes:
    """Return a Matroska element with a size of eight bytes."""
    data = b"".join(parts)
    return name + (len(data) | 1 << 56).to_bytes(8, "big") + data


def matroska(count: int) -> bytes:
    """Return a video of one track without frames, with `count` tags of different names."""
    head = element(b"\x1a\x45\xdf\xa3", element(b"\x42\x82", b"matroska"))
    video = element(b"\xe0", element(b"\xb0", b"\x40"), element(b"\xba", b"\x40"))
    track = element(b"\xae", element(b"\xd7", b"\1"), element(b"\x83", b"\1"), element(b"\x86", b"V_MJPEG"), video)
    simple = (element(b"\x67\xc8", element(b"\x45\xa3", b"%06d" % i), element(b"\x44\x87", b"x")) for i in range(count))
    tags = element(b"\x12\x54\xc3\x67", element(b"\x73\x73", *simple))
    return head + element(b"\x18\x53\x80\x67", element(b"\x16\x54\xae\x6b", track), tags, element(b"\x1f\x43\xb6\x75"))


def id3(count: int) -> bytes:
    frames = b"".join(struct.pack(">4sIH", b"TXXX", 10, 0) + b"\0%06d\0xx" % i for i in range(count))
    size = bytes((len(frames) >> 7 * place) & 127 for place in (3, 2, 1, 0))
    return b"ID3\x03\0\0" + size + frames


def riff(count: int) -> bytes:
    info = b"INFO" + b"".join(struct.pack("<4sI", b"%04X" % i, 2) + b"x\0" for i in range(count))
    return b"RIFF" + struct.pack("<I", len(info) + 12) + b"AVI LIST" + struct.pack("<I", len(info)) + info


@pytest.mark.parametrize("make", [matroska, id3, riff])
def test_many_tags_are_found(make) -> None:
    assert may_have_many_tags(make(9000) + PADDING)
    assert not may_have_many_tags(make(20) + (b"\xff" if make is id3 else b"") + PADDING)
    assert not may_have_many_tags(make(20))


def test_unknown_containers_may_have_tags_unless_they_are_small() -> None:
    assert may_have_many_tags(b"FLV" + PADDING)
    assert not may_have_many_tags(b"FLV" + bytes(100))
    assert may_have_many_tags(b"ID3\x04\0\0\0\0\0\0" + b"fLaC" + PADDING)


@pytest.mark.parametrize(
    "name", ["h264-mp4", "h264-ts", "h264-open-gop-mkv", "vp9-webm", "mjpeg-avi", "mpeg2-ps", "h264-raw", "gif"]
)
def test_usual_videos_are_read_in_a_thread(name) -> None:
    assert not may_have_many_tags(clip(name) + PADDING)


def test_audio_that_soundfile_reads_is_read_in_a_thread() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).normal(size=96_000), 48_000, format="FLAC")
    assert may_have_many_tags(file.getvalue())
    with mock.patch("sensorium.mm.media.isolate._ask", side_effect=InputError("asked")):
        gate.decode(MediaSource("audio", 0, file.getvalue()), DecodeSpec(), MediaPolicy())


@pytest.mark.parametrize("kind", ["video", "audio"])
@pytest.mark.parametrize("step", [gate.probe, gate.decode])
def test_many_tags_are_read_in_a_worker(kind, step) -> None:
    with (
        mock.patch("sensorium.mm.media.isolate._ask", side_effect=InputError("asked")) as ask,
        pytest.raises(MediaError, match="asked"),
    ):
        step(MediaSource(kind, 0, matroska(9000)), DecodeSpec(), MediaPolicy(), "someone")
    assert "someone" in ask.call_args.args
