"""Sample tables that list more than the file holds, and codecs that FFmpeg must not decode while it probes a header."""

from __future__ import annotations

import io
import struct
import time
from fractions import Fraction

import av
import pytest
from clips import CLIPS, clip
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media.audio import probe_audio
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.sample_tables import check_tables
from sensorium.mm.media.video import probe_video


def box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def full(kind: bytes, *numbers: int, flags: int = 0) -> bytes:
    return box(kind, struct.pack(f">{1 + len(numbers)}I", flags, *numbers))


def track(*tables: bytes, edits: bytes = b"") -> bytes:
    return box(b"ftyp", b"isom") + box(b"moov", box(b"trak", edits, box(b"mdia", box(b"minf", box(b"stbl", *tables)))))


FORGED = {
    "more samples of one size than bytes": track(full(b"stts", 1, 50_000_000, 512), full(b"stsz", 1, 50_000_000)),
    "a table of sizes that is not there": track(full(b"stsz", 0, 50_000_000)),
    "small sizes": track(box(b"stz2", struct.pack(">3I", 0, 4, 50_000_000))),
    "times": track(full(b"stts", 50_000_000)),
    "chunks": track(full(b"stco", 1 << 30)),
    "chunks of endless samples": track(
        full(b"stts", 1, 1, 1), full(b"stsz", 1, 1), full(b"stsc", 1, 1, 1 << 31, 1), full(b"stco", 4000, *range(4000))
    ),
    "fragments": box(b"moof", box(b"traf", full(b"trun", 50_000_000))) + bytes(10_000),
    "edits": track(full(b"stsz", 0, 5000, *([1] * 5000)), edits=box(b"edts", full(b"elst", 3000, *([9] * 9000)))),
    "a compressed header": box(b"moov", box(b"cmov", bytes(100))),
    "a header inside free space": box(b"free", box(b"moov", box(b"trak", full(b"stsz", 1, 50_000_000)))),
    "tables inside a description": track(box(b"stsd", full(b"stsz", 1, 50_000_000))),
    "tags": box(b"moov", box(b"udta", box(b"meta", bytes(4), box(b"hdlr"), box(b"ilst", box(b"----") * 5000)))),
    "tags in QuickTime's form": box(b"moov", box(b"meta", box(b"hdlr"), box(b"ilst", box(b"----") * 5000))),
    "boxes in boxes": b"".join(struct.pack(">I4s", 1 << 20, b"moov") for _ in range(100)),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_tables_are_refused_before_ffmpeg_reads_them(name: str) -> None:
    began = time.thread_time()
    for call in (
        lambda data: probe_video(data, FrameSampling(), MediaPolicy()),
        lambda data: probe_audio(data, 16000.0, MediaPolicy()),
    ):
        with pytest.raises(InputError, match="the file is broken or hostile"):
            call(FORGED[name])
    assert time.thread_time() - began < 1.0


def test_real_tables_pass() -> None:
    for name in CLIPS:
        check_tables(clip(name))
    pcm = track(
        full(b"stts", 1, 400_000, 1), full(b"stsz", 4, 400_000), full(b"stsc", 1, 1, 4000, 1), full(b"stco", 100, *range(100))
    )
    check_tables(pcm + box(b"mdat", bytes(1600)) + b"stsz" * 9)


@pytest.mark.parametrize("side", [64, 3000])
def test_still_images_in_a_video_are_not_decoded(side: int) -> None:
    """A PNG of 16000x16000 in a MOV was decoded by the probe: 2 GB."""
    png, out = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (side, side)).save(png, "PNG")
    with av.open(out, "w", format="mov") as container:
        stream = container.add_stream("png", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "rgb24"
        packet = av.Packet(png.getvalue())
        packet.stream, packet.pts, packet.dts, packet.time_base = stream, 0, 0, Fraction(1, 10)
        container.mux(packet)
    with pytest.raises(InputError, match="its codec png is not supported for video and audio"):
        probe_video(out.getvalue(), FrameSampling(), MediaPolicy())
