"""Step3-VL-10B: the width of its tower's MLPs, and the filters that resize its images. Step-3.7: the keys of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.kernels.activation.reference import limited_silu
from sensorium.mm.types import ImageItem
from sensorium.models.families.step3_vl.model import StepVL
from sensorium.models.families.step3_vl.processing import Step3VLProcessingInfo
from sensorium.models.text.decoder_config import decoder_spec
from sensorium.models.text.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec
from sensorium.models.text.stacks import stack_of
from sensorium.processors.files import ProcessorFiles

LLAMA3 = {
    "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
}  # fmt: skip


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


TEXT37 = {
    "model_type": "step3p5", "vocab_size": 20, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 9,
    "moe_intermediate_size": 8, "share_expert_dim": 24, "moe_router_scaling_factor": 3.0, "swiglu_limits": [0, 0, 0.0, 7.0],
    "swiglu_limits_shared": [2, None, 0, 16.0],
}  # fmt: skip
PUBLISHED37 = {
    "num_attention_groups": 2, "moe_num_experts": 6, "moe_top_k": 2, "moe_layers_enum": "2,3", "rope_theta": [5e6, 1e4] * 2,
    "partial_rotary_factors": [0.5, 1.0] * 2, "yarn_only_types": ["full_attention"], "rope_scaling": LLAMA3,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8,
    },
}  # fmt: skip
HUB37 = {
    "num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "per_layer_config": {"1": {"num_attention_heads": 6}, "3": {"num_attention_heads": 6}},
    "rope_parameters": {
        "full_attention": {**LLAMA3, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


def decoder37(**keys: Any) -> DecoderSpec:
    config = {"text_config": {**TEXT37, **keys}}
    return decoder_spec(config, stack_of(config))


def test_the_layers_of_step_3_7_have_heads_positions_and_limits_of_their_own() -> None:
    spec = decoder37(**PUBLISHED37)
    first, second = spec.attentions[:2]
    assert isinstance(first, AttentionSpec)
    assert isinstance(second, AttentionSpec)
    assert (first.heads, first.kv_heads, first.window, first.head_gate) == (4, 2, None, True)
    assert (second.heads, second.kv_heads, second.window, second.head_gate) == (6, 2, 9, True)
    assert first.rope is not None
    assert second.rope is not None
    assert (first.rope.theta, first.rope.dim, first.rope.scaling["factor"]) == (5e6, 4, 2.0)
    assert (second.rope.theta, second.rope.dim, second.rope.scaling) == (1e4, 8, {})
    dense, plain, without, limited = (layer.mlp for layer in spec.layers)
    assert dense == MlpSpec(16, limited_silu(2.0))
    assert plain == MlpSpec(16)
    assert isinstance(without, MoeSpec)
    assert isinstance(limited, MoeSpec)
    assert (without.act, without.of_shared.act, without.shared_inner, without.scale) == ("silu", "silu", 24, 3.0)
    assert (limited.act, limited.of_shared.act) == (limited_silu(7.0), limited_silu(16.0))


def test_the_publishers_keys_of_step_3_7_are_those_of_transformers() -> None:
    published, hub = decoder37(**PUBLISHED37), decoder37(**HUB37)
    ropes = [
        replace(rope, scaling={key: rope.scaling.get(key) for key in LLAMA3})
        for spec in (published, hub)
        for rope in spec.ropes
    ]
    assert ropes[:2] == ropes[2:]
    same = [
        [replace(layer, mixer=replace(layer.mixer, rope=None)) for layer in spec.layers]  # type: ignore[type-var]
        for spec in (published, hub)
    ]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("swiglu_limits", [0, 0, -1, 0]), ("swiglu_limits", [1]), ("attention_bias", True), ("use_head_wise_attn_gate", False)],
)
def test_bad_values_of_step_3_7_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError):
        decoder37(**PUBLISHED37, **{key: value})


@pytest.mark.parametrize("number", [0, 4, 5])
def test_filters_that_torch_does_not_widen_are_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"resample .* is {number}"):
        info_of(number)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_other_filters_resize_images(number: int) -> None:
    item = ImageItem(torch.zeros(70, 90, 3, dtype=torch.uint8))
    kwargs, _ = info_of(number).process(item, torch.float32)
    assert kwargs["pixel_values"].data.isfinite().all()
