"""Chains of files, and headers that count too few samples."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest
import soundfile
from made_audio import muxed, written
from sensorium.mm.media.audio import decode_audio, decode_with_warnings, probe_audio
from sensorium.mm.media.audio_files import is_streamable
from sensorium.mm.media.links import read_links
from sensorium.mm.media.mp3_frames import read_frames
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.riff_sizes import with_whole_size
from sensorium.mm.media.wrong_lengths import with_right_length
from timed_audio import tone

POLICY = MediaPolicy()


def encoded(samples: np.ndarray, rate: int, form: str, codec: str, out: io.RawIOBase | io.BytesIO | None = None) -> bytes:
    """Return mono samples in a container of FFmpeg, written to `out`."""
    out = out or io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="fltp", layout="mono")
        frame.sample_rate = rate
        fit = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate)
        for piece in [*fit.resample(frame), *fit.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return out.getvalue()


HIGH, LOW = tone(900, 1.0, 44_100), tone(300, 1.0, 16_000)
FORMS = {
    "wav": lambda samples, rate: written(samples, rate, "WAV", "PCM_16"),
    "aiff": lambda samples, rate: written(samples, rate, "AIFF", "PCM_16"),
    "flac": lambda samples, rate: written(samples, rate, "FLAC", None),
    "vorbis": lambda samples, rate: written(samples, rate, "OGG", "VORBIS"),
    "opus": lambda samples, rate: written(samples, {44_100: 48_000}.get(rate, rate), "OGG", "OPUS"),
    "mp3": lambda samples, rate: written(samples, rate, "MP3", None),
    "caf": lambda samples, rate: written(samples, rate, "CAF", "PCM_16"),
    "rf64": lambda samples, rate: written(samples, rate, "RF64", "PCM_16"),
    "w64": lambda samples, rate: written(samples, rate, "W64", "PCM_16"),
    "au": lambda samples, rate: written(samples, rate, "AU", "PCM_16"),
    "voc": lambda samples, rate: written(samples, rate, "VOC", "PCM_16"),
    "tta": lambda samples, rate: encoded(samples, rate, "tta", "tta"),
    "wavpack": lambda samples, rate: encoded(samples, rate, "wv", "wavpack"),
    "nut": lambda samples, rate: encoded(samples, rate, "nut", "pcm_s16le"),
    "caf of ffmpeg": lambda samples, rate: encoded(samples, rate, "caf", "pcm_s16le"),
    "au of ffmpeg": lambda samples, rate: encoded(samples, rate, "au", "pcm_s16be"),
}


def pitch(samples: np.ndarray) -> float:
    """Return the pitch in the middle."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    return float(np.abs(np.fft.rfft(middle)).argmax() * 16_000 / len(middle))


@pytest.mark.parametrize("kind", FORMS)
def test_chains_are_read_to_their_end(kind: str) -> None:
    parts = [FORMS[kind](HIGH, 44_100), FORMS[kind](LOW, 16_000), FORMS[kind](HIGH, 44_100)]
    wanted = [decode_audio(part, 16_000, POLICY).numpy() for part in parts]
    data = b"".join(parts)
    got = decode_with_warnings(data, 16_000, POLICY)
    assert len(got.samples) == sum(map(len, wanted)) == probe_audio(data, 16_000, POLICY).samples
    assert got.warnings == ()
    starts = np.cumsum([0, *map(len, wanted)])
    for start, part in zip(starts[:-1], wanted, strict=True):
        assert pitch(got.samples.numpy()[start : start + len(part)]) == pytest.approx(pitch(part), abs=5)
    assert read_links(data, POLICY).starts == (0, len(parts[0]), len(parts[0]) + len(parts[1]))


@pytest.mark.parametrize(("form", "codec"), [("ipod", "aac"), ("webm", "libopus"), ("flv", "aac"), ("adts", "aac")])
def test_containers_after_each_other(form: str, codec: str) -> None:
    rate = 48_000 if codec == "libopus" else 44_100
    part = muxed(form, codec, 40_000, rate)
    alone = len(decode_audio(part, 16_000, POLICY))
    assert len(decode_audio(part + part, 16_000, POLICY)) == pytest.approx(2 * alone, abs=2)


def test_an_mp3_goes_on_after_the_length_of_its_header() -> None:
    first, second = FORMS["mp3"](HIGH, 44_100), muxed("mp3", "libmp3lame", 44_100, 44_100, "mono", write_xing="0")
    got = len(decode_audio(first + second, 16_000, POLICY))
    assert got == pytest.approx(len(decode_audio(first, 16_000, POLICY)) + len(decode_audio(second, 16_000, POLICY)), abs=2)


def test_a_rate_that_changes_inside_a_stream_is_resampled() -> None:
    parts = [muxed("adts", "aac", 44_000, 44_100), muxed("adts", "aac", 44_000, 32_000)]
    lengths = [len(decode_audio(part, 16_000, POLICY)) for part in parts]
    data = b"".join(parts)
    assert len(decode_audio(data, 16_000, POLICY)) == pytest.approx(sum(lengths), abs=2)
    assert not probe_audio(data, 16_000, POLICY).exact


def test_a_part_that_cannot_be_read_is_reported() -> None:
    first = FORMS["flac"](LOW, 16_000)
    got = decode_with_warnings(first + b"fLaC\0\0\0\x22" + bytes(34), 16_000, POLICY)
    assert len(got.samples) == 16_000
    assert f"the joined file at bytes {len(first):,} to {len(first) + 42:,} cannot be read and is left out: " in got.warnings[0]


def test_chains_are_not_streamed(tmp_path) -> None:
    for name, data in (("one", FORMS["wav"](LOW, 16_000)), ("two", FORMS["wav"](LOW, 16_000) * 2)):
        (tmp_path / name).write_bytes(data)
        with open(tmp_path / name, "rb") as file:
            assert is_streamable(file) == (name == "one")


@pytest.mark.parametrize("announced", [0, 1000, 0xFFFFFFFF, 0x7FFFFFFF])
def test_sizes_in_a_wav_that_lie(announced: int) -> None:
    data = bytearray(FORMS["wav"](LOW, 16_000))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", announced)
    for whole in (0, len(data) - 8, 0xFFFFFFFF):
        data[4:8] = struct.pack("<I", whole)
        np.testing.assert_allclose(decode_audio(bytes(data), 16_000, POLICY).numpy(), LOW, atol=1e-4)


def put(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def lying(kind: str, announced: int) -> bytes:
    """Return one second of LOW in a file whose header announces so many bytes, frames or samples."""
    if kind.startswith("mp3"):
        data = FORMS["mp3"](LOW, 16_000)
        return put(data, data.index(b"Xing") + (8 if kind == "mp3 frames" else 12), struct.pack(">I", announced))
    data = FORMS[kind](LOW, 16_000)
    if kind == "flac":
        bits = int.from_bytes(data[18:26], "big") >> 36 << 36
        return put(data, 18, (bits | announced).to_bytes(8, "big"))
    chunk, skipped, form = {
        "caf": (b"data", 4, ">q"),
        "w64": (b"data\xf3\xac", 16, "<q"),
        "rf64": (b"ds64", 16, "<q"),
        "au": (b".snd", 8, ">I"),
    }[kind]
    return put(data, data.index(chunk) + skipped, struct.pack(form, announced))


LIES = [
    *(
        ("caf", 0),
        ("caf", 100),
        ("caf", -1),
        ("w64", 0),
        ("w64", 100),
        ("rf64", 0),
        ("rf64", 100),
        ("rf64", -1),
        ("au", 0),
        ("au", 100),
    ),
    *(("flac", 1000), ("flac", 4096), ("flac", 12_288), ("flac", 10**7), ("flac", (1 << 36) - 1)),
    *(("mp3 frames", 0), ("mp3 frames", 10), ("mp3 frames", 10**6), ("mp3 bytes", 0), ("mp3 bytes", 100)),
]


@pytest.mark.parametrize(("kind", "announced"), LIES)
def test_lengths_that_lie_do_not_hide_samples(kind: str, announced: int, tmp_path) -> None:
    data = lying(kind, announced)
    got = decode_with_warnings(data, 16_000, POLICY)
    header = probe_audio(data, 16_000, POLICY)
    assert len(got.samples) == header.samples
    assert len(got.samples) == 16_000
    honest = decode_audio(FORMS[kind.split()[0]](LOW, 16_000), 16_000, POLICY)
    np.testing.assert_allclose(got.samples.numpy(), honest.numpy(), atol=1e-4)
    assert len(got.warnings) == (announced != -1 and kind != "mp3 bytes")
    assert all("its header announces" in text for text in got.warnings)
    assert header.exact
    (tmp_path / "a").write_bytes(data)
    with open(tmp_path / "a", "rb") as file:
        assert not is_streamable(file) or kind == "mp3 bytes"


@pytest.mark.parametrize("kind", FORMS)
def test_lengths_that_are_right_are_trusted(kind: str) -> None:
    noise = np.random.default_rng(1).normal(0, 0.2, 100_000).astype(np.float32)
    data = FORMS[kind](noise, 16_000)
    assert with_whole_size(data) is None or "of ffmpeg" in kind  # FFmpeg leaves the size of a CAF open
    assert with_right_length(data, POLICY) is None
    assert decode_with_warnings(data, 16_000, POLICY).warnings == ()


def test_a_tag_before_an_mp3_is_no_file_of_its_own() -> None:
    tag = b"ID3\x04\0\0\0\0\0\x14" + bytes(20)
    got = decode_with_warnings(tag + lying("mp3 bytes", 0), 16_000, POLICY)
    assert (len(got.samples), got.warnings) == (16_000, ())


def test_an_mp3_whose_header_counts_only_frames_ends_after_them() -> None:
    first = FORMS["mp3"](LOW, 16_000)
    at = first.index(b"Xing")
    frames_only = put(first[: at + 12] + first[at + 16 :], at + 4, b"\0\0\0\x0d")
    frames_only = frames_only[: at + 12] + frames_only[at + 12 :][:124] + bytes(4) + frames_only[at + 136 :]
    second = muxed("mp3", "libmp3lame", 32_000, 16_000, "mono", write_xing="0")
    alone = len(decode_audio(second, 16_000, POLICY))
    assert read_links(frames_only + second, POLICY).starts == (0, len(frames_only))
    assert len(decode_audio(frames_only + second, 16_000, POLICY)) == pytest.approx(16_000 + alone, abs=1200)


@pytest.mark.parametrize("after", [b"LIST\x04\0\0\0INFO", bytes(400), b"TAG" + bytes(400), b"id3 \x90\x01\0\0" + b"\1" * 400])
def test_what_follows_the_samples_of_a_wav_is_not_read(after: bytes) -> None:
    assert len(decode_audio(FORMS["wav"](LOW, 16_000) + after, 16_000, POLICY)) == 16_000


@pytest.mark.parametrize("length", [1, 15, 4097, 53_269])
@pytest.mark.parametrize("loud", [False, True])
def test_the_last_frame_of_a_flac_may_have_few_samples(length: int, loud: bool) -> None:
    samples = np.random.default_rng(0).normal(0, 0.3, length) if loud else np.zeros(length)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="FLAC")
    assert with_right_length(file.getvalue(), MediaPolicy()) is None


@pytest.mark.parametrize("count", [50, 700, 3_000])
def test_an_mp3_is_read_on_after_bytes_that_are_no_frames(count: int, tmp_path) -> None:
    """soundfile stops there, with an error or without."""
    data = FORMS["mp3"](tone(300, 6.0, 16_000), 16_000)
    middle, foreign = len(data) // 2, np.random.default_rng(0).integers(0, 256, count, np.uint8).tobytes()
    damaged = data[:middle] + foreign + data[middle:]
    got = decode_with_warnings(damaged, 16_000, POLICY)
    assert len(got.samples) > 96_000 - 3 * 1152  # a packet that cannot be decoded has 576 samples
    assert pitch(got.samples.numpy()[-32_000:]) == pytest.approx(300, abs=5)
    (tmp_path / "a").write_bytes(damaged)
    with open(tmp_path / "a", "rb") as file:
        assert not is_streamable(file)
    assert not read_links(data, POLICY).has_holes


def test_a_hole_in_an_mp3_explains_that_it_has_fewer_frames_than_announced() -> None:
    """Its length is not put right, by which the decoder would cut off the end."""
    data = bytearray(FORMS["mp3"](tone(300, 2.0, 16_000), 16_000))
    frames = list(read_frames(bytes(data), 0, lambda: None))
    for begin, _ in frames[20:24]:
        data[begin : begin + 4] = bytes(4)
    got = decode_with_warnings(bytes(data), 16_000, POLICY)
    assert 32_000 - 5 * 576 <= len(got.samples) < 32_000
    assert not any("announces" in text for text in got.warnings)
    assert pitch(got.samples.numpy()[-8_000:]) == pytest.approx(300, abs=5)


def test_a_first_part_that_cannot_be_read_is_reported() -> None:
    first, second = FORMS["mp3"](HIGH, 44_100), FORMS["mp3"](LOW, 16_000)
    header = first[: read_frame(first)]
    got = decode_with_warnings(header + second, 16_000, POLICY)
    assert len(got.samples) == 16_000
    assert f"the joined file at bytes 0 to {len(header):,} cannot be read" in got.warnings[0]


def read_frame(data: bytes) -> int:
    """Return where the first frame of an MP3 ends."""
    return next(end for _, end in read_frames(data, 0, lambda: None))


def test_an_mp3_that_cannot_be_read_with_its_length_put_right_is_read_as_it_is() -> None:
    """No frame follows another at once, so that they seem to be fewer than they are."""
    data = FORMS["mp3"](LOW, 16_000)
    frames = [data[begin:end] for begin, end in read_frames(data, 0, lambda: None)]
    spread = frames[0] + b"".join(frame + bytes(96) for frame in frames[1:])
    assert with_right_length(spread, POLICY) is not None
    assert len(decode_audio(spread, 16_000, POLICY)) > 14_000
