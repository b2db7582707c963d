"""Gemma 4's processor beyond the parity suite: options, fewer rows, checkpoints without audio, transcription."""

from typing import Any

import pytest
from sensorium.mm.errors import ConfigError
from sensorium.mm.types import FramePlan, MediaHeader
from sensorium.processors.families.gemma4 import Gemma4ProcessingInfo
from sensorium.processors.files import ProcessorFiles


def info_of(*options: dict[str, Any], **config: Any) -> Gemma4ProcessingInfo:
    sections: dict[str, Any] = {"vision_config": {}, "audio_config": {}, **config}
    return Gemma4ProcessingInfo(ProcessorFiles(sections, {}, encode=lambda text: [ord(letter) for letter in text]), *options)


def test_an_image_has_at_most_the_rows_of_its_budget() -> None:
    for budget in (70, 1120):
        grid = info_of({"max_soft_tokens": budget}).geometry(MediaHeader("image", 480, 640))
        assert budget * 0.8 < grid.num_embeds <= budget
    with pytest.raises(ConfigError, match="70, 140, 280, 560 and 1120"):
        info_of({"max_soft_tokens": 100})


def test_items_shrink_to_fewer_rows_and_frames() -> None:
    info = info_of()
    assert info.shrink_kwargs("image", (1, 42, 60), 200) == {"max_soft_tokens": 140}
    assert info.shrink_kwargs("video", (32, 18, 24), 500) == {"max_soft_tokens": 70, "num_frames": 7}
    assert info.shrink_kwargs("image", (1, 42, 60), 60) is None


def test_the_time_of_each_frame_is_before_its_rows() -> None:
    info = info_of()
    plan = FramePlan((0, 240), (0.0, 61.5), 300, 1.0)
    span = info.span("video", info.geometry(MediaHeader("video", 480, 640, plan)))
    text = "".join(chr(token) for token in span.token_ids if token < 128)
    assert text == "00:00  01:01 "
    assert span.num_tokens == span.num_embeds + len(text) + 4


def test_checkpoints_without_an_audio_encoder_take_no_audio() -> None:
    large = info_of(audio_config=None, text_config={"use_bidirectional_attention": "vision"})
    assert large.modalities == ("image", "video")
    assert large.prompt_attention == "bidirectional_windows"
    assert info_of().prompt_attention == "causal"


def test_the_prompt_of_a_transcription() -> None:
    request = info_of().transcription_request("de", "transcribe", False, "")
    assert request.prompt.startswith(
        "<|turn>user\nTranscribe the following speech segment in German into German text.\n\nFollow"
    )
    assert request.prompt.endswith("instead of three.<|audio|><turn|>\n<|turn>model\n")
