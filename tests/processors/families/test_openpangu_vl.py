"""openPangu-VL: the area of a video's frames, options, published keys of config.json, and configs that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import FramePlan, MediaHeader
from sensorium.models.families.openpangu_vl.model import OpenPanguVL, sections_in_turn
from sensorium.models.families.openpangu_vl.processing import OpenPanguVLProcessingInfo
from sensorium.processors.files import ProcessorFiles

TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "bias": True, "sandwich_norm": True}
ROPE = {"type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48}


def info_of(video: Mapping[str, Any] = {}, **options: Any) -> OpenPanguVLProcessingInfo:
    special: dict[str, int] = {}
    files = ProcessorFiles(config={}, video=video, token_to_id=lambda text: special.setdefault(text, len(special)))
    return OpenPanguVLProcessingInfo(files, options)


def area(info: OpenPanguVLProcessingInfo, frames: int) -> int:
    """Return the pixels of each frame of a square video."""
    plan = FramePlan(tuple(range(frames)), tuple(map(float, range(frames))), frames, 1.0)
    grid = info.geometry(MediaHeader("video", 700, 700, plan))
    assert grid.t == frames
    return grid.h * grid.w * 14 * 14


def test_frames_share_the_area_of_a_video() -> None:
    """The area is 448 x 448 x 32 pixels, whatever the number of frames, between the bounds of one frame."""
    assert area(info_of(), 32) == 448 * 448
    assert area(info_of(), 128) == 224 * 224
    assert area(info_of(), 2) == 1008 * 1008
    assert area(info_of(total_pixels=56 * 56 * 32), 32) == 56 * 56
    fixed = info_of({"any_res_dynamic_video_pixels": False, "any_res_max_frame_pixels": 112 * 112})
    assert area(fixed, 2) == area(fixed, 32) == 112 * 112


@pytest.mark.parametrize(("size", "grid"), [((20, 100), (4, 20)), ((100, 28), (14, 4)), ((29, 100), (2, 8))])
def test_small_images_are_enlarged_first(size: tuple[int, int], grid: tuple[int, int]) -> None:
    found = info_of().geometry(MediaHeader("image", *size))
    assert (found.h, found.w) == grid


def test_fewer_rows_are_offered() -> None:
    info = info_of()
    options = info.shrink_kwargs("video", (32, 32, 32), 800)
    assert options is not None
    assert area(info_of(**options), 32) * 32 <= 800 * 28 * 28


def model(chosen: tuple[int, ...] = (-1, -3)) -> OpenPanguVL:
    vision = VISION | {"mm_unit_vision_select_layer": chosen}
    config = {**TEXT, "rope_scaling": ROPE, "rope_theta": 6.4e7, "vision_config": vision}
    return OpenPanguVL(config, torch.float32, torch.device("meta"))


def test_a_published_config_has_the_text_part_at_its_top() -> None:
    built = model()
    (layer,) = built.language_model.spec.layers
    assert layer.norms == ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    assert layer.mixer is not None
    assert (layer.mixer.bias, layer.mixer.out_bias) == (True, True)
    assert built.language_model.spec.ropes[0].axes == sections_in_turn((4, 2, 2))
    assert built.visual.spec.features == (2, 4)


def test_axes_are_used_up_evenly() -> None:
    assert sections_in_turn((3, 2, 2)) == (0, 1, 2, 0, 1, 2, 0)
    assert sections_in_turn((2, 3, 1)) == (0, 1, 2, 1, 1, 0)


@pytest.mark.parametrize("chosen", [(), (-5,), (0,), (-1, -1)])
def test_states_must_be_layers(chosen: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must be layers from -4 to -1, each once"):
        model(chosen)
