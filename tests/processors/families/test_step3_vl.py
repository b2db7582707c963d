"""Step3-VL-10B: the width of the MLPs of its tower, and the filters that resize its images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import ImageItem
from sensorium.models.families.step3_vl.model import StepVL
from sensorium.models.families.step3_vl.processing import Step3VLProcessingInfo
from sensorium.processors.files import ProcessorFiles


def inner(**vision: Any) -> int:
    text = {"model_type": "qwen3", "vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1}  # fmt: skip
    tower = {"width": 16, "layers": 1, "heads": 1, "image_size": 56, **vision}
    model = StepVL({"text_config": text, "vision_config": tower}, torch.float32, torch.device("meta"))
    return model.tower.spec.inner


def test_the_width_of_mlps_is_stated_or_follows_from_the_ratio() -> None:
    assert inner(mlp_ratio=2.5) == 40
    assert inner(mlp_ratio=2.49) == 39
    assert inner(mlp_ratio=2.5, intermediate_size=24) == 24


@pytest.mark.parametrize(
    ("key", "value"), [("mlp_ratio", "4"), ("mlp_ratio", 0), ("mlp_ratio", None), ("intermediate_size", 2.5)]
)
def test_bad_widths_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        inner(**{key: value})


def info_of(number: int) -> Step3VLProcessingInfo:
    config = {"vision_config": {"image_size": 56}}
    return Step3VLProcessingInfo(ProcessorFiles(config, {"resample": number, "patch_size": 28}, token_to_id=lambda text: 7))


@pytest.mark.parametrize("number", [0, 4, 5])
def test_filters_that_torch_does_not_widen_are_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"resample .* is {number}"):
        info_of(number)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_other_filters_resize_images(number: int) -> None:
    item = ImageItem(torch.zeros(70, 90, 3, dtype=torch.uint8))
    kwargs, _ = info_of(number).process(item, torch.float32)
    assert kwargs["pixel_values"].data.isfinite().all()
