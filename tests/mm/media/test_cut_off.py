"""Audio files that end before their headers say, with files that only look like it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from made_audio import FILES, NOISE, muxed, written
from sensorium.mm.media.cut_off import cut_off
from sensorium.mm.media.gate import decode
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.parse import MediaSource

CHECKED = ("wav", "aiff", "vorbis", "opus", "mp3")
ID3 = b"ID3\4\0\0\0\0\x20\0" + bytes(32 << 7)


def big_endian(count: int) -> bytes:
    samples = NOISE[0, :count].astype(">f4").tobytes()
    form = b"fmt " + struct.pack(">IHHIIHH", 16, 3, 1, 44_100, 4 * 44_100, 4, 32)
    body = b"WAVE" + form + b"data" + struct.pack(">I", len(samples)) + samples
    return b"RIFX" + struct.pack(">I", len(body)) + body


MADE = {
    **FILES,
    "wav, big-endian": big_endian,
    "wav with tags": lambda n: (wav := written(NOISE[0, :n]))[:12] + b"LIST\x05\0\0\0abcde\0" + wav[12:],
    "mp3 with tags": lambda n: ID3 + FILES["mp3"](n),
    "mp3 by lame": lambda n: muxed("mp3", "libmp3lame", n, 44_100),
}


@pytest.mark.parametrize("kind", MADE)
def test_whole_files_are_not_cut_off(kind: str) -> None:
    for count in (1000, 20_001, 44_100):
        assert cut_off(MADE[kind](count)) is None


@pytest.mark.parametrize("cut", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", [kind for kind in MADE if kind.startswith(CHECKED) and "unknown" not in kind])
def test_cut_off_files_are_recognised(kind: str, cut: float, tmp_path: Path) -> None:
    whole = MADE[kind](44_100)
    data = whole[: int(len(whole) * cut)]
    reason = cut_off(data)
    ogg = kind in ("vorbis", "opus")
    said = "its last Ogg page or packet is incomplete" if ogg else f"it has {len(data):,} of {len(whole):,} bytes"
    assert reason == f"it is cut off ({said}); download or export it again"
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        assert cut_off(file) == reason


@pytest.mark.parametrize("length", [0, 0x7FFF_F000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFDB, 0xFFFF_FFFF])
def test_lengths_of_recorders_that_write_into_a_pipe(length: int) -> None:
    """SoX, arecord, ffmpeg and GStreamer write these in place of a length that they do not know yet."""
    data = bytearray(written(NOISE[0], subtype="PCM_16"))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", length)
    assert cut_off(bytes(data)) is None


def test_a_length_that_counts_the_header() -> None:
    data = bytearray(written(NOISE[0], subtype="PCM_16"))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", len(data))
    assert cut_off(bytes(data)) is None


@pytest.mark.parametrize("kind", ["vorbis", "opus"])
def test_pages_of_ogg(kind: str) -> None:
    """A file that ends after a whole page passes unless its last packet goes on. Other bytes may follow the last page."""
    whole = FILES[kind](44_100)
    pages = [at for at in range(len(whole)) if whole.startswith(b"OggS\0", at)]
    for at in pages[2:]:
        assert cut_off(whole[:at]) is None
        assert cut_off(whole[: at + 26])
        goes_on = bytearray(whole[:at])
        last = pages[pages.index(at) - 1]
        goes_on[last + 26 + goes_on[last + 26]] = 255
        assert cut_off(bytes(goes_on))
    assert cut_off(whole + bytes(1 << 17)) is None


@pytest.mark.parametrize(
    "data", [b"", b"RIFF", b"RIFF\0\0\0\0WAVE" + b"LIST\0\0\0\0" * 5000, b"OggS", b"ID3", np.zeros(4), "a.wav", None]
)
def test_other_values(data: object) -> None:
    assert cut_off(data) is None


def test_a_prompt_with_such_a_file_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    whole = written(NOISE[0], subtype="PCM_16")
    for data, warnings in (whole, 0), (whole[: len(whole) // 2], 1):
        caplog.clear()
        decode(MediaSource("audio", 0, data, kind="audio"), DecodeSpec(rate=16_000), MediaPolicy())
        assert caplog.text.count("audio: it is cut off (it has ") == warnings
