"""Sounds from files and samples, against librosa and by count."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import soundfile
import torch
from sensorium.mm.errors import MediaError
from sensorium.mm.media.audio import load_audio

TONE = np.sin(2 * np.pi * 440 * np.arange(22_050) / 44_100).astype(np.float32) * 0.5


def wav(samples: np.ndarray, rate: int = 44_100) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format="WAV", subtype="FLOAT")
    return out.getvalue()


def test_equals_librosa(tmp_path):
    import librosa

    stereo = np.stack([TONE, np.random.default_rng(0).normal(0, 0.1, len(TONE)).astype(np.float32)], 1)
    (tmp_path / "a.wav").write_bytes(wav(stereo))
    want, _ = librosa.load(tmp_path / "a.wav", sr=16_000, mono=True, res_type="soxr_hq")
    got = load_audio(tmp_path / "a.wav", 0)
    assert got.dtype == torch.float32
    assert got.shape == (8000,) == want.shape
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


@pytest.mark.parametrize(("count", "source", "target"), [(1, 44_100, 16_000), (999, 48_000, 16_000), (1000, 8000, 22_050)])
def test_counts(count, source, target):
    assert len(load_audio((np.ones(count, np.float32), source), 0, target)) == math.ceil(count * target / source)


def test_equal_rates_leave_samples_alone():
    assert load_audio((TONE, 16_000.0000001), 0).numpy() is not TONE
    assert np.array_equal(load_audio((TONE, 16_000.0000001), 0).numpy(), TONE)
    assert np.array_equal(load_audio(wav(TONE, 16_000), 0).numpy(), TONE)


def test_mono_is_the_mean_of_channels():
    assert load_audio((np.array([[1.0, 2.0], [-1.0, 0.0]]), 16_000), 0).tolist() == [0.0, 1.0]
    assert load_audio((np.array([[1.0, 3.0]] * 3), 16_000), 0).tolist() == [2.0] * 3  # time first
    assert load_audio((torch.arange(48.0).view(6, 8), 16_000), 0).tolist() == [20.0 + i for i in range(8)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"no sound", "cannot be decoded"),
        ((np.zeros((2, 2, 2)), 16_000), "1 or 2 axes"),
        ((np.zeros(4, np.int16), 16_000), "floating point"),
        ((np.zeros(0), 16_000), "no samples"),
        ((np.zeros(4), 0), "positive number of hertz"),
        ("https://x/y.wav", "fetching https URLs is off"),
        (5, "a int is not a known form"),
    ],
)
def test_what_is_refused_is_named(value, text):
    with pytest.raises(MediaError, match=text) as error:
        load_audio(value, 1)
    assert str(error.value).startswith("audio 1: ")
