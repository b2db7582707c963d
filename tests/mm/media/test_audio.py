"""Decoding of audio files and samples, compared with librosa, soxr and the codecs."""

from __future__ import annotations

import io
import math
import re
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import soxr
import torch
from made_audio import FILES, NOISE, muxed, written
from sensorium.callers.errors import InputError
from sensorium.mm.media import audio
from sensorium.mm.media.audio import audio_windows, decode_audio, hash_audio, probe_audio
from sensorium.mm.media.audio_files import open_audio
from sensorium.mm.media.policy import MediaPolicy

POLICY = MediaPolicy()
TONE = np.sin(2 * np.pi * 440 * np.arange(22_050) / 44_100).astype(np.float32) * 0.5


def test_equals_librosa(tmp_path: Path) -> None:
    import librosa

    stereo = np.stack([TONE, NOISE[0, : len(TONE)]], 1)
    (tmp_path / "a.wav").write_bytes(written(stereo))
    want, _ = librosa.load(tmp_path / "a.wav", sr=16_000, mono=True, res_type="soxr_hq")
    got = decode_audio((tmp_path / "a.wav").read_bytes(), 16_000, POLICY)
    assert got.dtype == torch.float32
    assert got.shape == (8000,) == want.shape
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "source", "target"), [(1, 44_100, 16_000), (999, 48_000, 16_000), (1000, 8000, 22_050), (5, 1e7, 16_000)]
)
def test_numbers_of_samples(count: int, source: float, target: int) -> None:
    value = (np.ones(count, np.float32), source)
    want, policy = math.ceil(count * target / source), MediaPolicy(max_audio_rate=1e7)
    assert len(decode_audio(value, target, policy)) == want == probe_audio(value, target, policy).samples


@pytest.mark.parametrize("source", [44_100, 8000, 22_050, 48_000])
def test_resampling_in_blocks_equals_resampling_at_once(source: int) -> None:
    long = np.random.default_rng(1).normal(0, 0.1, 700_000).astype(np.float32)
    ours = decode_audio((long, source), 16_000, POLICY).numpy()
    theirs = soxr.resample(long, source, 16_000, quality="HQ")
    np.testing.assert_allclose(ours[: len(theirs)], theirs[: len(ours)], atol=1e-6)


def test_equal_rates_are_not_resampled() -> None:
    got = decode_audio((TONE, 16_000.0000001), 16_000, POLICY)
    assert np.array_equal(got.numpy(), TONE)
    assert not np.shares_memory(got.numpy(), TONE)
    assert np.array_equal(decode_audio(TONE, 16_000, POLICY).numpy(), TONE)
    assert np.array_equal(decode_audio(written(TONE, 16_000), 16_000, POLICY).numpy(), TONE)


def test_mono_is_the_mean_of_channels() -> None:
    def mono(samples: object) -> list[float]:
        return decode_audio((samples, 16_000), 16_000, POLICY).tolist()

    assert mono([[1, 2], [-1, 0]]) == [0.0, 1.0]
    assert mono(np.array([[1.0, 3.0]] * 3)) == [2.0] * 3  # time first
    assert mono(torch.arange(48.0).view(6, 8) / 16) == [(20.0 + i) / 16 for i in range(8)]
    assert mono(torch.tensor([0.5, -0.25], dtype=torch.bfloat16)) == [0.5, -0.25]


@pytest.mark.parametrize(("kind", "values"), [("int16", [-32768, 16384]), ("int32", [-(2**31), 2**30]), ("uint8", [0, 192])])
def test_pcm_is_scaled(kind: str, values: list[int]) -> None:
    samples = np.array(values * 8, kind)
    assert decode_audio((samples, 16_000), 16_000, POLICY).tolist() == [-1.0, 0.5] * 8
    assert decode_audio((torch.from_numpy(samples), 16_000), 16_000, POLICY).tolist() == [-1.0, 0.5] * 8


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("count", [1000, 20_001, 44_100])
def test_headers_have_the_number_of_decoded_samples(kind: str, count: int) -> None:
    data = FILES[kind](count)
    header = probe_audio(data, 16_000, POLICY)
    assert header.exact
    assert header.samples == len(decode_audio(data, 16_000, POLICY))


def test_rounded_times_give_an_upper_bound() -> None:
    data = muxed("matroska", "pcm_s16le", 20_000, 44_100)
    header = probe_audio(data, 16_000, POLICY)
    count = len(decode_audio(data, 16_000, POLICY))
    assert not header.exact
    assert count <= header.samples <= count + 32


def test_decoding_stops_at_the_maximum_of_the_model() -> None:
    data = muxed("matroska", "pcm_s16le", 20_000, 44_100)
    count = len(decode_audio(data, 16_000, POLICY))
    assert len(decode_audio(data, 16_000, POLICY, count)) == count
    with pytest.raises(InputError, match=r"^it lasts longer than the 0\.25 s that the model takes; cut it into several items$"):
        decode_audio(data, 16_000, POLICY, 4000)


def test_flac_of_unknown_length() -> None:
    data = bytearray(written(TONE, 16_000, "FLAC", None))
    data[21] &= 0xF0
    data[22:26] = bytes(4)  # the length in STREAMINFO
    assert probe_audio(bytes(data), 16_000, POLICY).samples == len(TONE)
    np.testing.assert_allclose(decode_audio(bytes(data), 16_000, POLICY).numpy(), TONE, atol=1e-4)


def test_containers_are_mixed_without_gain() -> None:
    """ffmpeg's own mix of floating channels to one is 3 dB too loud."""
    got = decode_audio(muxed("mp4", "alac", 20_000, 44_100), 44_100, POLICY).numpy()
    np.testing.assert_allclose(got, NOISE[:, :20_000].mean(0), atol=1e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"no sound", "not in a supported audio format"),
        (b"", "it is empty"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n", "not in a supported audio format"),
        (written(np.zeros((0, 1), np.float32)), "no samples"),
        ((np.zeros((2, 2, 2)), 16_000), "1 or 2 axes"),
        ((np.float32(1), 16_000), "not a known form"),
        ((np.zeros(4, np.int64), 16_000), r"floating point in -1..1 or PCM \(int16, int32, uint8\), not int64"),
        ((np.zeros(4, complex), 16_000), "not complex128"),
        ((torch.zeros(4, dtype=torch.bool), 16_000), "not bool"),
        ((torch.zeros(4, device="meta"), 16_000), "dense tensor"),
        ((torch.zeros(4).to_sparse(), 16_000), "dense tensor"),
        ((np.zeros(0), 16_000), "no samples"),
        (([[0.0, 1.0], [2.0]], 16_000), "all of one length"),
        (([None], 16_000), "not object"),
        ((np.array([0.0, np.nan]), 16_000), "NaN"),
        ((np.array([0.0, np.inf]), 8000), "NaN, infinite"),
        ((np.array([0.0, 1e300]), 8000), "far too large"),
        (written(np.array([0.0, np.nan], np.float32)), "NaN"),
        ((TONE * 32767, 16_000), r"reach 16,3\d\d\.\d+, but floating-point samples must be in about -1..1; divide 16-bit"),
        (written(TONE * 300), "divide 16-bit values by 32768, or give them as int16"),
        ([0, 12_000, -9000], "reach 12,000.000"),
        ((np.zeros(4), 0), "it must be from 1000 to 768000 Hz"),
        ((np.zeros(4), math.nan), "it must be from 1000 to 768000 Hz"),
        ((np.zeros(4), 10**400), "positive number of hertz"),
        ((np.broadcast_to(np.float32(0), 14_500_000), 1000), "limit max_audio_seconds is 14400"),
        (5, "a value of type int is not a known form"),
        ([5], "a single number is not a known form"),
        (np.array(5.0), "1 or 2 axes"),
        ("a.wav", "a value of type str is not a known form"),
        ((16_000, np.zeros(4, np.float32)), "samples, rate"),
        ((np.int64(16_000), torch.zeros(4)), "samples, rate"),
        ({"array": [0.0], "samplerate": 16_000}, "'samplerate'"),
        ({"array": [0.0]}, "sampling_rate"),
        ({}, "sampling_rate"),
    ],
)
def test_invalid_audio_is_refused_with_the_reason(value: object, text: str) -> None:
    with pytest.raises(InputError, match=text) as error:
        decode_audio(value, 16_000, POLICY)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=text):
        list(audio_windows(value, 16_000, 1.0, POLICY))


def test_too_long_audio_is_refused_from_the_header() -> None:
    policy = MediaPolicy(max_audio_seconds=0.4)
    for value in ((TONE, 44_100), written(TONE), muxed("ipod", "aac", 20_000, 16_000)):
        with pytest.raises(InputError, match=re.escape("the limit max_audio_seconds is 0.4 s")):
            probe_audio(value, 16_000, policy)
    assert probe_audio((TONE, 44_100), 16_000, MediaPolicy(max_audio_seconds=0.5)).samples == 8000


@pytest.mark.parametrize("rate", [1, 999, 768_001, 10_000_000])
def test_a_rate_that_multiplies_samples_is_refused_from_the_header(rate: int) -> None:
    """Fourteen thousand samples at 1 Hz would become 224 million."""
    data = written(np.zeros((14_000, 1), np.float32), rate, "WAV", "PCM_16")
    tracemalloc.start()
    for value in (data, (np.zeros(14_000, np.float32), rate)):
        for call in (probe_audio, decode_audio):
            with pytest.raises(InputError, match="min_audio_rate and max_audio_rate") as error:
                call(value, 16_000, POLICY)
            assert error.value.info.param == ("min_audio_rate" if rate < 1000 else "max_audio_rate")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert probe_audio(data, 16_000, MediaPolicy(min_audio_rate=1, max_audio_rate=1e7)).samples


def test_resampled_bytes_are_budgeted_from_the_header() -> None:
    policy = MediaPolicy(max_decoded_bytes=4 * 16_000)
    data = written(np.zeros((8_001, 1), np.float32), 8000, "WAV", "PCM_16")
    for call in (probe_audio, decode_audio):
        with pytest.raises(InputError, match="limit max_decoded_bytes is 64,000") as error:
            call(data, 16_000, policy)
    assert error.value.info.param == "max_decoded_bytes"
    assert len(decode_audio(data, 8_000, policy)) == 8_001


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", FILES)
def test_truncated_files_give_fewer_samples_or_an_error(kind: str, cut: float) -> None:
    whole = FILES[kind](20_001)
    data = whole[: int(len(whole) * cut)]
    try:
        most = probe_audio(data, 16_000, POLICY).samples
        got = decode_audio(data, 16_000, POLICY)
    except InputError:
        return
    assert 0 < len(got) <= most


def test_damaged_files_give_samples_or_an_error() -> None:
    rng = np.random.default_rng(3)
    read = 0
    for kind in FILES:
        whole = FILES[kind](5000)
        for _ in range(12):
            data = bytearray(whole)
            for at in rng.integers(0, len(data), rng.integers(1, 5)):
                data[at] = rng.integers(0, 256)
            try:
                header = probe_audio(bytes(data), 16_000, POLICY)
                got = decode_audio(bytes(data), 16_000, POLICY)
            except InputError:
                continue
            read += 1
            assert len(got) <= header.samples or not header.exact
            assert torch.isfinite(got).all()
    assert read > 60


@pytest.mark.parametrize(("form", "rate"), [("FLAC", 44_100), ("FLAC", 16_000)])
def test_windows_concatenate_to_the_whole_audio_in_constant_memory(form: str, rate: int) -> None:
    rng = np.random.default_rng(2)
    seconds = 240
    data = written((rng.normal(0, 0.1, (seconds * rate, 2))).astype(np.float32), rate, form, None)
    tracemalloc.start()
    pieces, lengths = [], []
    for window in audio_windows(data, 16_000, 7.0, POLICY):
        lengths.append(len(window))
        if len(lengths) % 10 == 1:
            pieces.append((len(lengths) - 1, window))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = sum(window.nbytes for _, window in pieces)
    assert peak < kept + 6e6 < seconds * 16_000 * 4  # numpy reports to tracemalloc; the whole is 15 MB, its source 84
    assert lengths[:-1] == [7 * 16_000] * 34
    assert sum(lengths) == seconds * 16_000
    whole = decode_audio(data, 16_000, POLICY)
    assert all(torch.equal(window, whole[i * 112_000 : (i + 1) * 112_000]) for i, window in pieces)


def test_windows_of_samples() -> None:
    pieces = list(audio_windows((TONE, 44_100), 16_000, 0.2, POLICY))
    assert [len(piece) for piece in pieces] == [3200, 3200, 1600]
    assert torch.equal(torch.cat(pieces), decode_audio((TONE, 44_100), 16_000, POLICY))
    with pytest.raises(InputError, match="holds no sample, or infinitely many"):
        next(audio_windows(TONE, 16_000, 0.0, POLICY))


@pytest.mark.parametrize(("limit", "most"), [(2.5, 4), (10.0, 7)])
def test_the_time_limit_of_windows_does_not_count_the_callers_time(
    limit: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four blocks takes a second of this thread's time, and the caller takes a minute for each window."""
    now, mix = [0.0], audio.Mixer.mix

    def slow(mixer: audio.Mixer, block: np.ndarray) -> np.ndarray:
        now[0] += 1.0
        return mix(mixer, block)

    monkeypatch.setattr(audio.Mixer, "mix", slow)
    monkeypatch.setattr("sensorium.mm.media.policy.time", SimpleNamespace(thread_time=lambda: now[0]))
    lengths = []
    with nullcontext() if most == 7 else pytest.raises(InputError, match=r"longer than 2\.5 s.*raise worker_seconds"):
        for window in audio_windows(np.zeros(1 << 20, np.float32), 16_000, 10.0, MediaPolicy(worker_seconds=limit)):
            now[0] += 60.0
            lengths.append(len(window))
    assert len(lengths) == most


def test_the_hash_depends_on_dtype_shape_and_rate() -> None:
    values = [
        b"abc", TONE, (TONE, 16_000), (TONE, 8000), TONE.reshape(2, -1), TONE.reshape(-1, 2), TONE.astype(np.float64),
        TONE[:-1], [0.5, 0.25], torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16),
    ]  # fmt: skip
    hashes = [hash_audio(value) for value in values]
    assert len(set(hashes)) == len(values)
    assert hash_audio((TONE.copy(), 16_000.0)) == hashes[2]
    assert hash_audio(bytearray(b"abc")) == hashes[0]


@pytest.mark.shared
@pytest.mark.parametrize(
    "name", ["jfk.m4a", "jfk.ogg", "jfk.opus", "jfk.webm", "jfk_16k.mp3", "jfk_44k1_stereo_24bit.flac", "jfk_8k_mulaw.wav"]
)
def test_the_same_speech_in_every_format(shared_data: Path, name: str) -> None:
    data = (shared_data / "speech" / "formats" / name).read_bytes()
    got = decode_audio(data, 16_000, POLICY).numpy()
    want = decode_audio((shared_data / "speech" / "jfk.flac").read_bytes(), 16_000, POLICY).numpy()
    assert probe_audio(data, 16_000, POLICY).samples == len(got)
    assert abs(len(got) - len(want)) <= 128
    late = 69 if name == "jfk.webm" else 0  # webm rounds the encoder's delay to milliseconds
    assert np.corrcoef(got[late : len(want)], want[: len(want) - late][: len(got) - late])[0, 1] > 0.95


@pytest.mark.shared
def test_awkward_files(shared_data: Path) -> None:
    folder = shared_data / "speech" / "formats"
    assert len(decode_audio((folder / "tiny_20ms.wav").read_bytes(), 16_000, POLICY)) == 320
    with pytest.raises(InputError, match="it is broken or cut off"):
        decode_audio((folder / "jfk_truncated.flac").read_bytes(), 16_000, POLICY)
    with pytest.raises(InputError):
        decode_audio((folder / "empty.wav").read_bytes(), 16_000, POLICY)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_window_is_a_number_of_samples(seconds):
    with pytest.raises(InputError, match="give a positive number of seconds"):
        next(audio_windows(np.zeros(10, np.float32), 16000, seconds, MediaPolicy()))


def test_the_error_for_raw_pcm_says_how_to_give_it():
    data = np.arange(800, dtype=np.int16).tobytes()
    with pytest.raises(InputError, match=r"give raw PCM as \(np.frombuffer\(data, np.int16\), rate\)"):
        probe_audio(data, 16_000, MediaPolicy())
    assert probe_audio((np.frombuffer(data, np.int16), 8000), 16_000, MediaPolicy()).samples == 1600


def test_samples_before_a_fault_are_yielded() -> None:
    rng = np.random.default_rng(0)
    samples = (rng.standard_normal(48_000) * 3000).astype(np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, "PCM_16", format="FLAC")
    whole, found = file.getvalue(), []
    with pytest.raises(InputError, match=r"it is broken or cut off \(flac decoder lost sync\);"):
        found.extend(block.samples for block in open_audio(whole[: len(whole) * 2 // 3]).blocks())
    read = np.concatenate(found, 1)[0]
    assert 16_000 < len(read) < 48_000
    assert np.array_equal(read, samples[: len(read)].astype(np.float32) / 32768)
