"""Data after the end of a container, with files that end as they say."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from made_audio import FILES, muxed
from sensorium.mm.media.gate import audio_blocks, decode
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.media.trailing import unread_data
from sensorium.mm.parse import MediaSource

MADE = {
    **FILES,
    "mp4": lambda count: muxed("mp4", "aac", count, 44_100),
    "mov": lambda count: muxed("mov", "aac", count, 44_100),
    "matroska": lambda count: muxed("matroska", "aac", count, 44_100),
    "avi": lambda count: muxed("avi", "pcm_s16le", count, 44_100),
}
OTHERS = random.Random(1).randbytes(5000)


@pytest.mark.parametrize("kind", MADE)
def test_whole_files_have_no_rest(kind: str, tmp_path: Path) -> None:
    data = MADE[kind](44_100)
    for rest in (b"", bytes(9000), OTHERS[:1000]):  # padding, and a tag
        assert unread_data(data + rest) is None
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        assert unread_data(file) is None


@pytest.mark.parametrize("kind", ["mp4", "mov", "matroska", "avi", "vorbis", "opus"])
@pytest.mark.parametrize("count", [5000, 2 << 20])
def test_a_rest_is_counted(kind: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = MADE[kind](44_100)
    rest = OTHERS * (count // 5000)
    text = unread_data(data + rest)
    assert text is not None
    assert text.endswith(" bytes after the end of its container have no known format; they are not read")
    assert text.startswith(f"{len(rest):,} ")
    (tmp_path / "file").write_bytes(data + rest)
    with open(tmp_path / "file", "rb") as file:
        assert unread_data(file) == text
    source = MediaSource("audio", 0, data + rest)
    with caplog.at_level(logging.WARNING, logger="sensorium"):
        (item,) = decode(source, DecodeSpec(), MediaPolicy())
    assert f"audio: {text}" in caplog.messages
    (whole,) = decode(MediaSource("audio", 0, data), DecodeSpec(), MediaPolicy())
    assert item.samples.shape == whole.samples.shape
    told: list[str] = []
    for _ in audio_blocks(source, 16_000, MediaPolicy(), warn=told.append):
        pass
    assert text in told


def test_a_recording_that_was_not_ended_has_no_rest() -> None:
    """Its size is 0: it goes on to the end of the file."""
    data = MADE["avi"](44_100)
    assert unread_data(data[:4] + bytes(4) + data[8:]) is None


def test_fillers_after_a_segment_are_part_of_the_file() -> None:
    assert unread_data(MADE["matroska"](44_100) + b"\xec" + (1 << 28 | 9000).to_bytes(4, "big") + b"\1" * 9000) is None
