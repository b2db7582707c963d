"""The log-mel spectrogram against transformers' Whisper extractor, and by rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.processors.mel import MelSpec, filter_bank, log_mel, read_mel_spec

LONGEST = 480_000
SECONDS = np.arange(LONGEST) / 16_000
SOUND = (
    0.3 * np.sin(2 * np.pi * (200 + 50 * SECONDS) * SECONDS) * np.clip(np.sin(2 * np.pi * 0.7 * SECONDS), 0, 1)
    + np.random.default_rng(0).normal(0, 0.01, LONGEST)
).astype(np.float32)


def oracle(mels: int, samples: np.ndarray, **options: Any) -> tuple[np.ndarray, int]:
    """Return features `[frames, mels]` and the number of frames with audio."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=mels)
    made = extractor(samples, sampling_rate=16_000, return_tensors="np", return_attention_mask=True, **options)
    return made["input_features"][0].T, int(made["attention_mask"].sum())


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("count", [1, 160, 161, 201, 320, 48_000, 479_801, 479_999, 480_000])
def test_equals_the_published_extractor(mels: int, count: int) -> None:
    """Audio is padded to 30 s. With `max_frames`, `log_mel` returns the first of the same frames."""
    want, sounding = oracle(mels, SOUND[:count])
    spec = MelSpec(mels)
    got = log_mel(torch.from_numpy(SOUND[:count]), spec, LONGEST)
    assert got.shape == (3000, mels)
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    np.testing.assert_allclose(got.numpy(), want, atol=1e-5)
    assert spec.num_frames(count) == sounding
    for frames in (1, sounding, min(sounding + 2, 3000)):
        start = log_mel(torch.from_numpy(SOUND[:count]), spec, LONGEST, frames)
        assert torch.equal(start, got[:frames])


@pytest.mark.parametrize("count", [48_000, 47_999, 16_123])
def test_equals_the_published_extractor_without_silence(count: int) -> None:
    want, _ = oracle(128, SOUND[:count], padding="do_not_pad")
    np.testing.assert_allclose(log_mel(torch.from_numpy(SOUND[:count]), MelSpec(128)).numpy(), want, atol=1e-5)


@pytest.mark.parametrize("samples", [np.zeros(16_000, np.float32), np.full(16_000, 1e-7, np.float32), SOUND * 1000])
def test_silence_and_loudness(samples: np.ndarray) -> None:
    want, _ = oracle(80, samples)
    np.testing.assert_allclose(log_mel(torch.from_numpy(samples), MelSpec(80), LONGEST).numpy(), want, atol=1e-5)


@pytest.mark.parametrize(
    ("mels", "rate", "window"), [(80, 16_000, 400), (128, 16_000, 400), (24, 8000, 256), (64, 22_050, 512)]
)
def test_filters_equal_the_published_bank(mels: int, rate: int, window: int) -> None:
    from transformers.audio_utils import mel_filter_bank

    want = mel_filter_bank(window // 2 + 1, mels, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(filter_bank(MelSpec(mels, rate, window)).numpy(), want, atol=1e-7)


def test_filters_without_a_frequency_are_silent() -> None:
    """A short FFT window has fewer frequencies than filters."""
    spec = MelSpec(256, 16_000, 64, 32, 16_000)
    table = filter_bank(spec)
    deaf = table.sum(0) == 0
    assert deaf.any()
    bands = log_mel(torch.from_numpy(SOUND[:16_000]), spec)
    assert (bands[:, deaf] == bands.min()).all()


def test_lengths_that_do_not_fit() -> None:
    for count, length in ((201, 200), (480_001, 480_000), (200, None), (0, None)):
        with pytest.raises(InputError, match="samples do not fit"):
            log_mel(torch.zeros(count), MelSpec(), length)


def test_spec_from_json() -> None:
    assert read_mel_spec({}, MelSpec(128)) == MelSpec(128, 16_000, 400, 160, LONGEST)
    read = read_mel_spec(
        {"feature_size": 40, "chunk_length": 4, "sampling_rate": 8000, "n_fft": 200, "hop_length": 80}, MelSpec()
    )
    assert read == MelSpec(40, 8000, 200, 80, 32_000)


@pytest.mark.parametrize(
    ("audio", "text"),
    [
        ({"feature_size": 0}, "feature_size of the feature extractor is 0"),
        ({"chunk_length": 1.5}, "chunk_length of the feature extractor is 1.5"),
        ({"hop_length": True}, "hop_length of the feature extractor is True"),
        ({"dither": 1e-4}, "dither of the feature extractor adds random noise"),
    ],
)
def test_bad_json_is_named(audio: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_mel_spec(audio, MelSpec())
