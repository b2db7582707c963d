"""Kimi-K2.5's config.json as first published and as it is now; refused configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.families.kimi_k25.model import KimiK25

TEXT = {
    "model_type": "kimi_k2", "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
FIRST = {
    "vt_hidden_size": 48, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 3, "vt_intermediate_size": 96,
    "init_pos_emb_height": 5, "init_pos_emb_width": 5, "init_pos_emb_time": 2, "merge_kernel_size": [2, 2],
    "projector_ln_eps": 1e-4,
}  # fmt: skip


def build(vision: dict[str, Any], **config: Any) -> KimiK25:
    return KimiK25({"text_config": TEXT, "vision_config": vision} | config, torch.float32, torch.device("meta"))


def test_the_first_names_mean_the_later_ones() -> None:
    later = {key.removeprefix("vt_").removeprefix("init_"): value for key, value in FIRST.items()}
    del later["projector_ln_eps"]
    first, now = build(FIRST), build(later, projection_layer_norm_eps=1e-4)
    assert first.visual.spec == now.visual.spec
    assert first.merger.spec == now.merger.spec
    assert (first.visual.spec.width, first.visual.spec.depth, first.frames, first.merger.spec.eps) == (48, 3, 2, 1e-4)


@pytest.mark.parametrize("wrong", [{"init_pos_emb_width": 6}, {"merge_kernel_size": [2, 1]}, {"hidden_act": "none"}], ids=str)
def test_what_is_not_supported_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        build(FIRST | wrong)
