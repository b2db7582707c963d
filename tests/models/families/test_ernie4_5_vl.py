"""Ernie-4.5-VL: pairs of frames, a config.json with the decoder's part at the top level, refused configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.families.ernie4_5_vl.model import Ernie45VL, _frame_pairs

TEXT = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rope_scaling": {"type": "default", "mrope_section": [3, 3, 2]}, "moe_num_experts": [6, 6],
    "moe_k": 2, "moe_intermediate_size": [48, 32], "moe_layer_start_index": [1, 1],
}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}


def build(text: dict[str, Any], **vision: Any) -> Ernie45VL:
    return Ernie45VL({**text, "vision_config": VISION | vision}, torch.float32, torch.device("meta"))


def test_frames_are_joined_in_pairs_and_an_image_with_itself() -> None:
    assert _frame_pairs([(2, 2), (1, 1)]).tolist() == [0, 2, 1, 3, 4, 4]
    assert _frame_pairs([(1, 2), (4, 1)]).tolist() == [0, 0, 1, 1, 2, 3, 4, 5]


def test_the_decoder_may_lie_at_the_top_of_the_config() -> None:
    assert build(TEXT).spec == build({"text_config": TEXT}).spec
    assert build(TEXT).spec.rope_axes == 3


@pytest.mark.parametrize("wrong", [{"temporal_merge_size": 3}, {"hidden_act": "none"}], ids=str)
def test_what_is_not_supported_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        build(TEXT, **wrong)
