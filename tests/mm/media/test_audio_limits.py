"""Limits of audio that hold while a file is searched and decoded, not only for what its header announces."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from made_audio import muxed, written
from sensorium.callers.errors import InputError
from sensorium.mm.media import audio, links
from sensorium.mm.media.audio_container import AudioBlock, AudioHeader, TrackReader
from sensorium.mm.media.audio_files import AudioFile, is_streamable, open_audio
from sensorium.mm.media.links import MOST_BOXES, MOST_LINKS, MOST_STREAMS, read_links
from sensorium.mm.media.policy import AudioSelection, DecodeClock, MediaPolicy
from sensorium.mm.media.riff_sizes import with_whole_size
from timed_audio import Track, timed, tone

POLICY = MediaPolicy()
ENDED = MediaPolicy(worker_seconds=1e-9)  # a policy whose clock has run out at its first check
READERS = {
    "whole": partial(audio.decode_with_warnings, b"x", 16_000),
    "windows": lambda policy: list(audio.audio_windows(b"x", 16_000, 1.0, policy)),
    "blocks": lambda policy: list(audio.audio_blocks(b"x", 16_000, policy)),
}


def changing(monkeypatch: pytest.MonkeyPatch, rate: float, count: int) -> list[int]:
    """Make every file 1,000 samples at 16 kHz, and then blocks of `count` samples at another rate. Return the blocks read."""
    blocks_read = []

    def blocks() -> Iterator[AudioBlock]:
        yield AudioBlock(np.zeros((1, 1000), np.float32), 16_000)
        for number in range(3):
            blocks_read.append(number)
            yield AudioBlock(np.ones((1, count), np.float32), rate)

    file = AudioFile((AudioHeader(16_000, 1000, False),), blocks)
    monkeypatch.setattr(audio, "open_audio", lambda *args: file)
    return blocks_read


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("rate", [1.0, 999.0, 800_000.0])
def test_a_rate_inside_a_stream_is_checked(reader: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_read = changing(monkeypatch, rate, 100)
    with pytest.raises(InputError) as error:
        READERS[reader](POLICY)
    assert error.value.info.code == "invalid_value"
    assert error.value.info.param == ("max_audio_rate" if rate > 1000 else "min_audio_rate")
    assert blocks_read == [0]


@pytest.mark.parametrize("reader", READERS)
def test_a_block_is_counted_before_it_is_resampled(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 samples at 16 kHz and 12,000 at 1 kHz last 12.06 s."""
    blocks_read = changing(monkeypatch, 1000.0, 12_000)
    resampled: list[int] = []
    add = audio.Resampling.add
    monkeypatch.setattr(audio.Resampling, "add", lambda self, piece: resampled.append(len(piece)) or add(self, piece))
    limits = MediaPolicy(max_audio_seconds=10.0, max_transcribed_seconds=10.0)
    with pytest.raises(InputError) as caught:
        READERS[reader](limits)
    info = caught.value.info
    assert (info.code, info.limit, info.value) == ("over_limit", 10.0, 12.0625)
    assert blocks_read == [0]
    assert sum(resampled) == 1000


def test_a_rate_inside_a_stream_counts_in_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    changing(monkeypatch, 8000.0, 1000)
    assert len(audio.decode_with_warnings(b"x", 16_000, POLICY).samples) == 1000 + 3 * 2000


def ogg_page(serial: int, body: bytes, flags: int = 0, granule: int = 0) -> bytes:
    laces = bytes([len(body)]) if body else b""
    return b"OggS\0" + struct.pack("<BQIIIB", flags, granule, serial, 0, 0, len(laces)) + laces + body


def box(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", 8 + len(body)) + kind + body


HEAD = b"OpusHead" + bytes(11)
XING = b"\xff\xfb\x90\0" + bytes(32) + b"Info\0\0\0\x01" + bytes(8)
LINK = {
    "flac": b"fLaC\0\0\0\x22",
    "mp4": box(b"ftyp") + box(b"moov"),
    "mp3": XING,
    "ogg": ogg_page(7, HEAD, 2) + ogg_page(7, b"\0", granule=1),
}


@pytest.mark.parametrize("kind", LINK)
def test_a_chain_of_too_many_links_is_refused_at_the_first_beyond_the_limit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_LINKS", 5)
    steps: list[int] = []
    monkeypatch.setattr(links.Steps, "add", lambda self, count=1: steps.append(count))
    assert len(read_links(LINK[kind] * 5, POLICY).starts) == 5
    steps.clear()
    with pytest.raises(InputError) as caught:
        read_links(LINK[kind] * 5000, POLICY)
    assert (caught.value.info.code, caught.value.info.limit) == ("over_limit", 5)
    assert len(steps) < 30


def test_boxes_and_streams_are_limited() -> None:
    assert (MOST_LINKS, MOST_STREAMS, MOST_BOXES) == (4096, 4096, 200_000)
    start = box(b"ftyp") + box(b"moov")
    assert read_links(start + box(b"moof") * (MOST_BOXES - 2), POLICY).starts == (0,)
    with pytest.raises(InputError, match="it has more than 200,000 boxes"):
        read_links(start + box(b"moof") * (MOST_BOXES - 1), POLICY)
    serials = [ogg_page(serial, HEAD, 2) for serial in range(MOST_STREAMS + 1)]
    assert read_links(b"".join(serials[:-1]), POLICY).starts == (0,)
    with pytest.raises(InputError) as caught:
        read_links(b"".join(serials), POLICY)
    assert (caught.value.info.code, caught.value.info.limit) == ("over_limit", 4096)


MANY = {
    "pages": ogg_page(1, HEAD, 2) + ogg_page(1, b"") * 1200,
    "pages with other bytes between": ogg_page(1, HEAD, 2) + (ogg_page(1, b"") + b"x") * 600,
    "boxes": box(b"ftyp") + box(b"moof") * 1200,
    "frames of mp3": XING * 1200,
    "tags": XING + b"ID3\4\0\0\0\0\0\0" * 1200 + XING,
    "starts of flac": b"fLaC\0\0\0\x22" * 1200,
    "bytes": b"fLaC" + bytes(1 << 20),
}


@pytest.mark.parametrize("kind", MANY)
def test_the_search_for_links_is_limited_in_time(kind: str, tmp_path: Path) -> None:
    read_links(MANY[kind], POLICY)
    with pytest.raises(InputError, match=r"longer than 1e-09 s") as error:
        read_links(MANY[kind], ENDED)
    assert error.value.info.param == "worker_seconds"
    (tmp_path / "file").write_bytes(MANY[kind])
    with open(tmp_path / "file", "rb") as file, pytest.raises(InputError, match=r"longer than 1e-09 s"):
        read_links(file, ENDED)


def test_the_policy_of_the_caller_limits_the_search(tmp_path: Path) -> None:
    data = written(tone(300, 40.0, 16_000), 16_000, "WAV", "PCM_16")  # two pieces of the search
    with pytest.raises(InputError, match=r"longer than 1e-09 s"):
        open_audio(data, policy=ENDED)
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file, pytest.raises(InputError, match=r"longer than 1e-09 s"):
        is_streamable(file, ENDED)


def silent_first(*others: np.ndarray) -> bytes:
    return timed("matroska", *(Track(samples) for samples in (np.zeros(48_000, np.float32), *others)))


def test_eight_other_tracks_are_searched_for_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, loud = np.zeros(4800, np.float32), tone(440, 0.1)
    opened: list[int | str] = []
    blocks = TrackReader.blocks
    monkeypatch.setattr(TrackReader, "blocks", lambda self: opened.append(self.sound.track) or blocks(self))
    (warning,) = audio.decode_with_warnings(silent_first(*[quiet] * 7, loud), 16_000, POLICY).warnings
    assert "its audio track 0 is silent, but track 8 of" in warning
    opened.clear()
    assert audio.decode_with_warnings(silent_first(*[quiet] * 8, loud), 16_000, POLICY).warnings == ()
    assert opened == ["default", *range(1, 9)]


class _Counted(DecodeClock):
    """A clock that runs out at its third check."""

    checks = 0

    def check(self) -> None:
        self.checks += 1
        if self.checks > 2:
            raise InputError("slow", param="worker_seconds")


def test_the_clock_ends_the_search_for_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = TrackReader(
        silent_first(np.zeros(48_000, np.float32), tone(440, 0.1)), AudioSelection(), POLICY, lambda text: None
    )
    assert "track 2 of" in (reader.other_sound(DecodeClock(POLICY)) or "")
    clock = _Counted(POLICY)
    assert reader.other_sound(clock) is None
    assert clock.checks == 3  # the third packet of track 1; track 2 is not opened

    monkeypatch.setattr(TrackReader, "_frames", lambda self, container, stream: iter(()))
    assert reader.other_sound(DecodeClock(POLICY)) is None


def test_packets_without_samples_are_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packets of the second track are cut to a byte, so that no block comes from them."""
    data = bytearray(muxed("ipod", "aac", 40_000, 44_100, "mono"))
    start = data.index(b"mdat") + 4
    data[start : data.index(b"moov") - 4] = b"\xff" * (data.index(b"moov") - 4 - start)
    clock = _Counted(POLICY)
    reader = TrackReader(bytes(data), AudioSelection(0), POLICY, lambda text: None, clock=clock)
    with pytest.raises(InputError, match="slow"):
        list(reader.blocks())
    assert clock.checks == 3


def test_blocks_use_the_callers_clock_for_other_tracks(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(TrackReader, "other_sound", lambda self, clock: seconds.append(clock._seconds))
    list(audio.audio_blocks(silent_first(tone(440, 0.1)), 16_000, MediaPolicy(worker_seconds=123.0)))
    assert seconds == [123.0]


def lying(announced: int, samples: np.ndarray) -> bytes:
    data = bytearray(written(samples, 16_000, "WAV", "PCM_16"))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", announced)
    return bytes(data)


@pytest.mark.parametrize("pause", [0.2, 10.0, 70.0])
def test_samples_after_a_silence_at_the_announced_end_are_read(pause: float) -> None:
    samples = np.concatenate([tone(300, 0.5, 16_000), np.zeros(round(pause * 16_000), np.float32), tone(300, 0.5, 16_000)])
    got = audio.decode_audio(lying(16_000, samples), 16_000, POLICY)
    assert len(got) == len(samples)


def test_zeros_after_the_announced_end_are_padding() -> None:
    samples = np.concatenate([tone(300, 0.5, 16_000), np.zeros(800_000, np.float32)])
    assert len(audio.decode_audio(lying(16_000, samples), 16_000, POLICY)) == 8000


def test_a_size_above_4_gib_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = lying(16_000, tone(300, 1.0, 16_000))
    with open(tmp_path / "large.wav", "wb") as file:
        file.write(data)
        file.truncate(5 << 30)  # a hole, which takes no space
    with open(tmp_path / "large.wav", "rb") as file:
        repaired = with_whole_size(file)
        assert repaired is not None
        assert repaired.data == b""
        assert f"announces 16,000 bytes of samples, but {(5 << 30) - 44:,} are there" in repaired.reason
    monkeypatch.setattr("sensorium.mm.media.riff_sizes._LARGEST", 20_000)  # as if the header's field were smaller
    repaired = with_whole_size(data)
    assert repaired is not None
    assert repaired.data[40:44] == struct.pack("<I", 20_000)


@pytest.mark.parametrize(("skipped", "left"), [(0, 41_984), (500, 41_484), (1105, 40_879), (2112, 39_872), (3000, 38_984)])
def test_a_header_counts_what_an_edit_list_leaves(skipped: int, left: int) -> None:
    """Apple's encoder has a delay of 2,112 samples: FFmpeg drops whole packets, and the rest from the next one."""
    data = bytearray(muxed("ipod", "aac", 40_000, 44_100))
    at = data.index(b"elst") + 16
    data[at : at + 4] = struct.pack(">i", skipped)  # the time in the media at which the edit begins
    header = audio.probe_audio(bytes(data), 44_100, POLICY)
    assert (header.samples, header.exact) == (left, True)
    assert len(audio.decode_audio(bytes(data), 44_100, POLICY)) == left
