"""MiDashengLM and Fun-Audio-Chat beyond the parity suite: lengths, start and end tokens, prompts, configs that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import MediaHeader
from sensorium.models.families.funaudiochat.processing import FunAudioChatProcessingInfo
from sensorium.models.families.midashenglm.processing import MiDashengLMProcessingInfo
from sensorium.processors.bases.base import add_brackets
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.interface import SupportsTranscription

RATE, SPOKEN = 16_000, "<|audio_bos|><|AUDIO|><|audio_eos|>"
MIDASHENG = {  # of the published 7B checkpoint
    "audio_encoder_config": {
        "n_mels": 64, "patch_size": [64, 4], "patch_stride": [64, 4], "target_length": 1008, "f_min": 0.0, "f_max": 8000.0,
        "n_fft": 512, "win_length": 512, "hop_length": 160, "center": True, "sample_rate": 16000,
    },
    "subsample_factor": 5, "audio_token_id": 151646, "text_config": {"vocab_size": 152064, "hidden_size": 3584},
}  # fmt: skip


def midasheng(audio: dict[str, Any] | None = None, **encoder: Any) -> MiDashengLMProcessingInfo:
    config = MIDASHENG | {"audio_encoder_config": MIDASHENG["audio_encoder_config"] | encoder}  # type: ignore[operator]
    files = {"feature_size": 1, "sampling_rate": RATE, "do_normalize": False}
    return MiDashengLMProcessingInfo(ProcessorFiles(config=config, audio=files | (audio or {})))


def rows(info: Any, samples: int) -> int:
    return int(info.geometry(MediaHeader("audio", samples=samples)).num_embeds)


def test_lengths_of_midashenglm() -> None:
    """The last frame is centred on the end of the audio; 20 minutes is the limit."""
    info = midasheng()
    assert [rows(info, n) for n in (3040, 6239, 6240, 10 * RATE, 1200 * RATE)] == [1, 1, 2, 50, 6000]
    with pytest.raises(InputError, match=r"its 3039 samples are too few for one token; give at least 3040 \(190 ms\)"):
        rows(info, 3039)
    with pytest.raises(InputError, match="at most 1200 s"):
        rows(info, 1200 * RATE + 1)
    assert MiDashengLMProcessingInfo(ProcessorFiles()).specs == info.specs


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"f_max": 7000.0}, "f_max is 7000.0 in audio_encoder_config"),
        ({"center": False}, "center is False"),
        ({"win_length": 400}, "win_length is 400"),
        ({"patch_stride": [64, 0]}, "patch_stride is 0"),
        ({"sample_rate": 8000}, "sample_rate is 8000 in audio_encoder_config of config.json"),
        ({"audio": {"do_normalize": True}}, "do_normalize"),
    ],
)
def test_front_ends_that_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        midasheng(**wrong)


def test_lengths_of_fun_audio_chat() -> None:
    """A row is five speech tokens of 40 ms; an incomplete group makes a row, an incomplete token none."""
    info = FunAudioChatProcessingInfo(ProcessorFiles())
    assert [rows(info, n) for n in (640, 3200, 3839, 3840, 30 * RATE)] == [1, 1, 1, 2, 150]
    with pytest.raises(InputError, match="give at least 640"):
        rows(info, 639)
    longer = FunAudioChatProcessingInfo(ProcessorFiles(audio={"feature_size": 128, "chunk_length": 300}))
    assert rows(longer, 300 * RATE) == 1500
    with pytest.raises(ConfigError, match="group_size is 0"):
        FunAudioChatProcessingInfo(ProcessorFiles(config={"audio_config": {"group_size": 0}})).num_rows(100)


def test_tokens_around_audio() -> None:
    """They are added where both are absent; prompts whose items are expanded stay as they are."""
    assert add_brackets([7, 1, 8], 1, 1, 2, 3) == [7, 2, 1, 3, 8]
    assert add_brackets([1, 1], 1, 2, 2, 3) == [2, 1, 3, 2, 1, 3]
    for ids, items in (([2, 1, 3], 1), ([2, 1, 8], 1), ([7, 1, 3], 1), ([2, 1, 1, 3], 1), ([7], 0)):
        assert add_brackets(ids, 1, items, 2, 3) == ids
    assert add_brackets([7, 1, 8], 1, 1, None, 3) == [7, 1, 8]


def test_prompts_that_ask_for_a_transcript() -> None:
    told = midasheng().transcription_request("zh", "transcribe", False, "").prompt
    assert told.endswith(f"user\n{SPOKEN}Transcribe the speech into text <|zh|><|im_end|>\n<|im_start|>assistant\n")
    assert "into text<|im_end|>" in midasheng().transcription_request(None, "transcribe", False, "").prompt
    fun = FunAudioChatProcessingInfo(ProcessorFiles())
    assert f"{SPOKEN}\nPlease help me transcribe" in fun.transcription_request(None, "transcribe", False, "").prompt
    assert isinstance(fun, SupportsTranscription)
    assert isinstance(midasheng(), SupportsTranscription)
