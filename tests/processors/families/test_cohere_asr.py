"""Cohere's transcription models, Canary and Parakeet: prompts, the publisher's config.json, and limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import MediaHeader
from sensorium.models.families.cohere_asr.config import read_nemo_config
from sensorium.models.families.cohere_asr.processing import CanaryProcessingInfo, CohereAsrProcessingInfo
from sensorium.models.families.parakeet.processing import ParakeetProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.nemo_mel import NemoMelSpec, nemo_log_mel

RATE = 16_000
NEMO = {
    "transf_decoder": {"config_dict": {"hidden_size": 512, "inner_size": 2048, "num_layers": 4, "max_sequence_length": 256}},
    "encoder": {"d_model": 640, "n_layers": 6, "n_heads": 8, "ff_expansion_factor": 4, "feat_in": 128, "xscaling": False},
    "head": {"num_classes": 999},
}


def test_prompts() -> None:
    info, canary = CohereAsrProcessingInfo(ProcessorFiles()), CanaryProcessingInfo(ProcessorFiles())
    ask = "<|startofcontext|><|startoftranscript|><|emo:undefined|><|{}|><|{}|><|pnc|><|noitn|><|notimestamp|><|nodiarize|>"
    assert info.transcription_request("de", "transcribe", False, "").prompt == ask.format("de", "de")
    assert info.transcription_request(None, "transcribe", False, "").prompt == ask.format("en", "en")
    assert canary.transcription_request("de", "translate", False, "").prompt == ask.format("de", "en")
    with pytest.raises(InputError, match="does not detect the language that it translates; give language"):
        canary.transcription_request(None, "translate", False, "")
    assert (info.tasks, canary.tasks) == (("transcribe",), ("transcribe", "translate"))
    assert info.parse_transcript(" Hallo.<|endoftext|>", "de") == ("Hallo.", "de")
    assert info.parse_transcript("Hello.", None) == ("Hello.", "en")
    assert ParakeetProcessingInfo(ProcessorFiles()).transcription_request(None, "transcribe", False, "").prompt == ""


def test_the_token_that_begins_a_text_is_added_once() -> None:
    ids = {"\u2581": 5, "<|startofcontext|>": 7}
    info = CohereAsrProcessingInfo(ProcessorFiles(token_to_id=ids.get))
    assert list(info.preprocess_prompt([7, 4], {"audio": 1})) == [5, 7, 4]
    assert list(info.preprocess_prompt([5, 7, 4], {"audio": 1})) == [5, 7, 4]
    assert list(info.preprocess_prompt([4], {"audio": 1})) == [4]


def test_the_publishers_config_is_read() -> None:
    read = read_nemo_config(NEMO)
    assert (read["hidden_size"], read["num_hidden_layers"], read["vocab_size"]) == (512, 4, 999)
    assert read["encoder_config"] == {
        "hidden_size": 640,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 2560,
        "num_mel_bins": 128,
        "scale_input": False,
    }
    info = CohereAsrProcessingInfo(ProcessorFiles(config=NEMO))
    assert (info.embed_width, info.alignment().sizes) == (512, (4, 8))
    with pytest.raises(ConfigError, match="encoder in config"):
        read_nemo_config({"encoder": 5})


def test_lengths() -> None:
    info, canary = CohereAsrProcessingInfo(ProcessorFiles()), CanaryProcessingInfo(ProcessorFiles())
    parakeet = ParakeetProcessingInfo(ProcessorFiles())
    for samples, rows in {320: 1, RATE: 13, 35 * RATE: 438}.items():
        for one in (info, canary, parakeet):
            assert one.geometry(MediaHeader("audio", samples=samples)).num_embeds == rows
    for one, seconds in ((info, 35), (canary, 40), (parakeet, 60)):
        assert one.row_seconds == 0.08
        with pytest.raises(InputError, match=f"at most {seconds} s"):
            one.geometry(MediaHeader("audio", samples=seconds * RATE + 1))
        with pytest.raises(InputError, match="give at least 320"):
            one.geometry(MediaHeader("audio", samples=319))


@pytest.mark.parametrize(
    ("audio", "reason"),
    [
        ({"win_length": 513}, "win_length of the feature extractor is 513"),
        ({"preemphasis": 1.5}, "preemphasis of the feature extractor is 1.5"),
        ({"dither": -1}, "dither of the feature extractor is -1"),
        ({"max_audio_clip_s": "x"}, "max_audio_clip_s of the feature extractor is 'x'"),
        ({"hop_length": 0}, "hop_length of the feature extractor is 0"),
    ],
)
def test_wrong_preprocessors_are_named(audio: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CohereAsrProcessingInfo(ProcessorFiles(audio=audio))


def test_bands_have_mean_0_and_variance_1() -> None:
    """Silence stays finite, and dither is the same for the same audio."""
    samples = torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    bands = nemo_log_mel(samples, NemoMelSpec())
    assert bands.shape == (100, 80)
    assert bands.mean(0).abs().max() < 1e-4
    assert (bands.var(0) - 1).abs().max() < 1e-3
    assert torch.isfinite(nemo_log_mel(torch.zeros(320), NemoMelSpec())).all()
    dithered = NemoMelSpec(dither=1e-2)
    assert torch.equal(nemo_log_mel(samples, dithered), nemo_log_mel(samples, dithered))
    assert not torch.equal(nemo_log_mel(samples, dithered), bands)
