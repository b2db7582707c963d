"""Mixing of channels: the mean, the better one of two that cancel each other out, or a chosen one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sensorium
import soundfile
from made_audio import written
from sensorium.callers.errors import InputError
from sensorium.mm.media.audio import audio_blocks, decode_with_warnings
from sensorium.mm.media.policy import AudioSelection, MediaPolicy
from timed_audio import tone

POLICY = MediaPolicy()
RATE = 16_000
SPEECH = tone(440, 3.3, RATE)
OTHER = np.random.default_rng(0).normal(0, 0.1, len(SPEECH)).astype(np.float32)


def mono(left: np.ndarray, right: np.ndarray, channel: int | str = "mix") -> tuple[np.ndarray, tuple[str, ...]]:
    data = written(np.stack([left, right], 1), RATE)
    got = decode_with_warnings(data, RATE, POLICY, None, AudioSelection(channel=channel))
    return got.samples.numpy(), got.warnings


@pytest.mark.parametrize("share", [1.0, 0.9, 0.75])
def test_channels_out_of_phase_are_not_averaged(share: float) -> None:
    got, warnings = mono(share * SPEECH, -SPEECH)
    assert np.array_equal(got, SPEECH if share == 1.0 else -SPEECH)
    assert len(warnings) == 1
    assert "out of phase" in warnings[0]


@pytest.mark.parametrize("right", [np.zeros_like(SPEECH), OTHER, SPEECH, 0.5 * SPEECH, -0.2 * SPEECH, np.roll(SPEECH, 7)])
def test_other_channels_are_averaged(right: np.ndarray) -> None:
    got, warnings = mono(SPEECH, right)
    np.testing.assert_allclose(got, (SPEECH + right) / 2, atol=1e-7)
    assert warnings == ()


VOICE = np.asarray(soundfile.read(Path(sensorium.__file__).parent / "assets/speech/alarm.flac", dtype="float32")[0])
LEVEL = float(np.sqrt(np.square(VOICE).mean()))


def like(noise: np.ndarray, decibel: float) -> np.ndarray:
    noise = np.resize(noise, len(VOICE))
    return (noise / np.sqrt(np.square(noise).mean()) * LEVEL * 10 ** (decibel / 20)).astype(np.float32)


TIMES = np.arange(len(VOICE)) / RATE
COMMON = {
    "hum": like(np.sin(2 * np.pi * 50 * TIMES), -10),
    "loud hum and its harmonics": like(sum(np.sin(2 * np.pi * 60 * k * TIMES) / k**2 for k in (1, 2, 3)), 6),
    "rumble": like(np.cumsum(OTHER), 6),
    "noise": like(OTHER, -14),
    "louder noise": like(OTHER, -10),
    "offset": np.full(len(VOICE), 0.5, np.float32),
}


@pytest.mark.parametrize("kind", COMMON)
@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_what_both_channels_have_does_not_hide_that_their_speech_cancels(kind: str, sides: str) -> None:
    common = COMMON[kind]
    channels = VOICE + common * (sides != "right"), -VOICE + common * (sides != "left")
    got, warnings = mono(*channels)
    clean = {"both": channels, "left": channels[1:], "right": channels[:1]}[sides]
    good = channels if "noise" in kind else clean  # above 200 Hz, noise is not known from speech
    differences = [np.abs(got - channel)[: 3 * RATE].max() for channel in good]  # what follows is quieter than the noise
    assert min(differences) < 1e-4
    assert len(warnings) == 1
    assert "out of phase" in warnings[0]


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_a_weaker_channel_out_of_phase_does_not_weaken_the_other(share: float) -> None:
    got, warnings = mono(VOICE, -share * VOICE)
    assert np.abs(got - VOICE).max() < 1e-4
    assert len(warnings) == 1


def test_a_channel_of_a_constant_does_not_hide_the_other() -> None:
    got, warnings = mono(np.full_like(VOICE, 0.8), VOICE)
    assert np.abs(got - VOICE).max() < 1e-4
    assert len(warnings) == 1
    assert "constant offset" in warnings[0]
    same, none = mono(VOICE + 0.2, VOICE + 0.2)  # both have it
    np.testing.assert_allclose(same, VOICE + 0.2, atol=1e-4)
    assert none == ()


@pytest.mark.parametrize("kind", COMMON)
def test_common_sound_alone_is_averaged(kind: str) -> None:
    got, warnings = mono(VOICE + COMMON[kind], 0.7 * VOICE + COMMON[kind])
    np.testing.assert_allclose(got, 0.85 * VOICE + COMMON[kind], atol=1e-4)
    assert warnings == ()


def test_one_of_six_channels_has_the_speech() -> None:
    channels = np.zeros((6, len(SPEECH)), np.float32)
    channels[2] = SPEECH
    got = decode_with_warnings((channels, RATE), RATE, POLICY)
    np.testing.assert_allclose(got.samples.numpy(), SPEECH / 6, atol=1e-7)
    assert got.warnings == ()


def test_only_the_stretch_out_of_phase_uses_one_channel() -> None:
    right = np.concatenate([SPEECH[:RATE], -SPEECH[RATE:]])
    got, _ = mono(SPEECH, right)
    assert np.array_equal(got, SPEECH)


@pytest.mark.parametrize(("right", "cancels"), [(OTHER, False), (-SPEECH, True)])
def test_a_short_end_is_mixed_as_the_second_before_it(right: np.ndarray, cancels: bool) -> None:
    end = np.full(RATE // 10, 0.5, np.float32)
    got, warnings = mono(np.append(SPEECH[: 2 * RATE], end), np.append(right[: 2 * RATE], -end))
    assert len(warnings) == cancels
    np.testing.assert_allclose(got[2 * RATE :], end if cancels else 0.0, atol=1e-4)


def test_a_chosen_channel() -> None:
    for channel, want in ((0, SPEECH), ("left", SPEECH), (1, OTHER), ("right", OTHER), ("1", OTHER)):
        assert np.array_equal(mono(SPEECH, OTHER, channel)[0], want)
    with pytest.raises(InputError) as error:
        mono(SPEECH, OTHER, 2)
    assert error.value.info.param == "channel"
    one = decode_with_warnings((SPEECH, RATE), RATE, POLICY, None, AudioSelection(channel="right"))
    assert np.array_equal(one.samples.numpy(), SPEECH)


def test_blocks_do_not_change_the_result() -> None:
    data = written(np.stack([SPEECH, -SPEECH], 1), RATE)
    texts = list[str]()
    blocks = list(audio_blocks(data, RATE, POLICY, warn=texts.append))
    assert np.array_equal(np.concatenate(blocks), SPEECH)
    assert len(texts) == 1
