"""Step3-VL-10B's tower: the width of its MLPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.mm.errors import ConfigError
from sensorium.models.families.step3_vl import StepVL


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
