"""Gemma 4's processor beyond the parity suite: options, fewer rows, checkpoints without audio, transcription."""

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.rules import CAUSAL
from sensorium.mm.types import AudioItem, FramePlan, MediaHeader
from sensorium.models.families.gemma4.processing import BIDIRECTIONAL_WINDOWS, Gemma4ProcessingInfo
from sensorium.models.families.gemma4_unified.processing import Gemma4UnifiedProcessingInfo
from sensorium.processors.files import ProcessorFiles


def info_of(*options: dict[str, Any], kind: type[Gemma4ProcessingInfo] = Gemma4ProcessingInfo, **config: Any) -> Any:
    sections: dict[str, Any] = {"vision_config": {}, "audio_config": {}, **config}
    return kind(ProcessorFiles(sections, {}, encode=lambda text: [ord(letter) for letter in text]), *options)


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
    assert large.prompt_attention == BIDIRECTIONAL_WINDOWS
    assert info_of().prompt_attention == CAUSAL


def test_the_prompt_of_a_transcription() -> None:
    request = info_of().transcription_request("de", "transcribe", False, "")
    assert request.prompt.startswith(
        "<|turn>user\nTranscribe the following speech segment in German into German text.\n\nFollow"
    )
    assert request.prompt.endswith("instead of three.<|audio|><turn|>\n<|turn>model\n")


def test_rows_of_the_model_without_encoders_are_whole_squares_and_frames_of_samples() -> None:
    info = info_of(kind=Gemma4UnifiedProcessingInfo)
    assert info.prompt_attention == BIDIRECTIONAL_WINDOWS
    grid, other = (one.geometry(MediaHeader("image", 480, 640)) for one in (info, info_of()))
    assert (grid.num_embeds, 3 * grid.h, 3 * grid.w) == (other.num_embeds, other.h, other.w)
    samples = torch.arange(1, 1282, dtype=torch.float32)
    tensors, grid = info.process(AudioItem(samples, 16_000), torch.float32)
    assert (grid.num_embeds, int(tensors["audio_frames"].data)) == (3, 3)
    assert torch.equal(tensors["input_features"].data.flatten()[:1281], samples)
    assert not tensors["input_features"].data.flatten()[1281:].any()
    with pytest.raises(InputError, match=r"the model takes at most 30 s"):
        info.geometry(MediaHeader("audio", samples=480_001))


def test_a_line_of_rows_has_positions() -> None:
    small = {"vision_config": {"mm_posemb_size": 200}, "kind": Gemma4UnifiedProcessingInfo}
    assert info_of({"max_soft_tokens": 140}, **small).specs["image"].rows == 140
    with pytest.raises(ConfigError, match="max_soft_tokens is 280, but the model has positions for 200 rows in a line"):
        info_of(**small)


def test_images_that_would_keep_their_size_are_refused() -> None:
    files = ProcessorFiles({"vision_config": {}}, {"do_resize": False}, encode=lambda text: [])
    with pytest.raises(ConfigError, match="do_resize is false"):
        Gemma4ProcessingInfo(files)
