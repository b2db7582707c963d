"""FireRedASR2's prompt, features and limits."""

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.families.fireredasr2.encoder import fire_red_encoder_spec
from sensorium.models.families.fireredasr2.processing import FireRedAsr2ProcessingInfo, NormalisedMelSpec, normalised_frames
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.kaldi_mel import kaldi_log_mel

ENCODER = {"idim": 80, "n_layers_enc": 16, "n_head": 20, "d_model": 1280}
STATISTICS = {"means": [10.0] * 80, "inverse_std_variences": [0.25] * 80}


def info_of(config: dict[str, Any] | None = None, **audio: Any) -> FireRedAsr2ProcessingInfo:
    files = {"vocab_size": 152064, "audio_encoder_conf": ENCODER, **(config or {})}
    return FireRedAsr2ProcessingInfo(
        ProcessorFiles(config=files, audio={**STATISTICS, **audio}, token_to_id={"<|AUDIO|>": 151646}.get)
    )


def test_the_prompt_and_the_placeholder_are_the_publishers() -> None:
    info = info_of()
    assert info.placeholder_ids == {"audio": 151646}
    request = info.transcription_request(None, "transcribe", False, "")
    assert request.prompt == "<|im_start|>user\n<|AUDIO|>请转写音频为文字<|im_end|>\n<|im_start|>assistant\n"


def test_a_token_per_two_rows_of_four_frames() -> None:
    assert [info_of().num_rows(frames) for frames in (1, 4, 5, 12, 13, 2998)] == [0, 0, 1, 1, 2, 375]
    assert [info_of({"encoder_downsample_rate": 3}).num_rows(frames) for frames in (8, 9, 20, 21)] == [0, 1, 1, 2]
    assert info_of().decode_spec.max_audio_samples == 480_000


def test_frames_are_normalised_per_band() -> None:
    samples = torch.linspace(-0.5, 0.5, 1200).sin()
    plain = NormalisedMelSpec(means=(0.0,) * 80, factors=(1.0,) * 80)
    shifted = NormalisedMelSpec(means=tuple(map(float, range(80))), factors=(0.5,) * 80)
    expected = (normalised_frames(samples, plain).double() - torch.arange(80)) * 0.5
    assert torch.equal(normalised_frames(samples, shifted), expected.float())


def test_the_window_is_zero_at_both_ends() -> None:
    samples = torch.zeros(400)
    samples[-1] = 1.0  # the last sample of the frame has no weight, but changes its mean
    spec = NormalisedMelSpec(centered=False)
    assert torch.equal(kaldi_log_mel(samples, spec), kaldi_log_mel(torch.zeros(400), spec))


@pytest.mark.parametrize(
    "audio",
    [
        {"means": None},
        {"means": [1.0] * 79},
        {"means": [float("nan")] * 80},
        {"inverse_std_variences": "1" * 80},
        {"num_mel_bins": 40},
        {"frame_shift": 20},
        {"sampling_rate": 8000},
        {"chunk_length": 31},
        {"max_length": 2997},
        {"max_length": 3001},
    ],
)
def test_other_feature_extractors_are_refused(audio: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        info_of(**audio)


@pytest.mark.parametrize("changes", [{"n_head": 3}, {"kernel_size": 32}, {"idim": 6}, {"d_model": None}])
def test_other_encoders_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        fire_red_encoder_spec(ENCODER | changes)
