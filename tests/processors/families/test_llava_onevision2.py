"""LLaVA-OneVision-2: frames of videos by their length, marks around a video, and checkpoints that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.mm.geometry import sample_indices
from sensorium.models.families.llava_onevision2.model import LlavaOnevision2
from sensorium.models.families.llava_onevision2.processing import LlavaOnevision2ProcessingInfo
from sensorium.processors.files import ProcessorFiles

START, END, IMAGE, VIDEO = 151652, 151653, 151655, 151656


def info_of(options: dict[str, Any] | None = None, image: dict[str, Any] | None = None) -> LlavaOnevision2ProcessingInfo:
    config = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    return LlavaOnevision2ProcessingInfo(ProcessorFiles(config=config, image=image or {}), options or {})


@pytest.mark.parametrize(("seconds", "options", "count"), [
    (4, {}, 8), (10, {}, 16), (29, {}, 16), (30, {}, 384), (4, {"num_frames": 5}, 5), (29, {"fps": 1.0}, 29),
    (1000, {"fps": 1.0}, 384), (4, {"max_frames": 4}, 4), (1000, {"num_frames": 500}, 500),
])  # fmt: skip
def test_frames_by_length(seconds: int, options: dict[str, Any], count: int) -> None:
    """Short videos have 8 or 16 frames, from the first to the last one, unless the caller says how many."""
    chosen = sample_indices(30 * seconds, 30.0, info_of(options).decode_spec.sampling)
    assert (len(chosen), chosen[0], chosen[-1]) == (count, 0, 30 * seconds - 1)


def test_marks_around_a_video_are_removed() -> None:
    """Each frame has its own. Those of images stay, and a video may be written without."""
    info = info_of()
    ids = [7, START, IMAGE, END, START, VIDEO, END, 8, VIDEO, END, START]
    assert info.preprocess_prompt(ids, {"image": 1, "video": 2}) == [7, START, IMAGE, END, VIDEO, 8, VIDEO, END, START]
    assert info.preprocess_chat(ids[:4], {"image": 1}) == ids[:4]


def test_patches_of_several_frames_are_refused() -> None:
    with pytest.raises(ConfigError):
        info_of(image={"temporal_patch_size": 2})


@pytest.mark.parametrize("change", [{"num_attention_heads": 64}, {"layer_norm_type": "group_norm"}])
def test_other_towers_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LlavaOnevision2({"vision_config": change, "text_config": {}}, torch.float32, torch.device("meta"))
