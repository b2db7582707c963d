"""Published configs of stacks with states describe the same decoders as those that transformers writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.families.llava.model import LlavaNext, MiniMaxVL
from sensorium.models.text.decoder_config import decoder_spec
from sensorium.models.text.spec import AttentionSpec, DecoderSpec, KdaSpec, LightningSpec, MambaSpec, SelectiveSpec
from sensorium.models.text.stacks import stack_of

SIZES = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}


def spec(**config: Any) -> DecoderSpec:
    return decoder_spec(SIZES | config, stack_of(config))


def test_patterns_of_nemotron_h() -> None:
    shape = {"model_type": "nemotron_h", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2}
    kinds = ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]
    found = spec(**shape, hybrid_override_pattern="M-*EM", attention_head_dim=128)
    assert found == spec(**shape, layers_block_type=kinds)
    assert [type(layer.mixer).__name__ for layer in found.layers] == [
        "MambaSpec", "NoneType", "AttentionSpec", "NoneType", "MambaSpec",
    ]  # fmt: skip
    assert not found.ropes


def test_both_mixers_of_falcon_h1() -> None:
    found = spec(model_type="falcon_h1", mamba_d_ssm=96, mamba_n_heads=6, ssm_multipliers=[1, 2, 3, 4, 5], ssm_in_multiplier=2)
    assert [[type(one) for one in layer.mixers] for layer in found.layers] == [[AttentionSpec, MambaSpec]] * 5
    assert found.layers[0].second is not None
    assert found.layers[0].second.multipliers == (2, 4, 6, 8, 10)
    with pytest.raises(ConfigError, match="6 heads of 16 numbers"):
        spec(model_type="falcon_h1", mamba_d_ssm=97, mamba_n_heads=6)


def test_layers_of_kimi_linear() -> None:
    linear = {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 2}
    published = {"model_type": "kimi_linear", "linear_attn_config": linear, "num_experts_per_token": 2, "mla_use_nope": True}
    kinds = [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full")]
    sizes = {"linear_head_dim": 16, "linear_num_heads": 3, "linear_conv_kernel_dim": 2}
    sparse = ["dense", "sparse", "sparse", "sparse", "sparse"]
    found = spec(**published)
    assert found == spec(model_type="kimi_linear", layer_types=kinds, mlp_layer_types=sparse, num_experts_per_tok=2, **sizes)
    assert found.layers[0].mixer == KdaSpec(heads=3, head_dim=16, taps=2)
    assert not found.ropes
    with pytest.raises(ConfigError, match="mla_use_nope"):
        spec(**published | {"mla_use_nope": False})


def test_step_widths_of_mamba() -> None:
    automatic = spec(model_type="mamba", hidden_size=100, time_step_rank="auto")
    assert automatic == spec(model_type="mamba", hidden_size=100, time_step_rank=7)
    assert isinstance(automatic.layers[0].mixer, SelectiveSpec)
    assert automatic.layers[0].mixer.norm_eps is None
    normed = spec(model_type="falcon_mamba").layers[0].mixer
    assert isinstance(normed, SelectiveSpec)
    assert normed.norm_eps == 1e-6


def test_layers_of_minimax() -> None:
    published = {
        "model_type": "minimax_text_01", "attn_type_list": [0, 0, 1, 0, 1], "rotary_dim": 8, "head_dim": 16, "postnorm": True,
        "layernorm_full_attention_alpha": 3.5, "layernorm_linear_attention_alpha": 2.5, "layernorm_mlp_alpha": 1.5,
        "shared_intermediate_size": 0, "num_local_experts": 4, "rope_theta": 1e7,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
    native = {
        "model_type": "minimax", "layer_types": kinds, "head_dim": 16, "rope_parameters": rope, "num_local_experts": 4,
        "full_attn_alpha_factor": 3.5, "linear_attn_alpha_factor": 2.5, "mlp_alpha_factor": 1.5,
    }  # fmt: skip
    found = spec(**published)
    assert found == spec(**native)
    assert [layer.residuals[0][0] for layer in found.layers if layer.residuals] == [2.5, 2.5, 3.5, 2.5, 3.5]
    slopes = [layer.mixer.slopes for layer in found.layers if isinstance(layer.mixer, LightningSpec)]
    assert slopes[0][0] == pytest.approx(2**-2 * (1 + 1e-5))
    assert slopes[0] > slopes[1] > slopes[2], "later layers forget less"
    with pytest.raises(ConfigError, match="postnorm"):
        spec(**published | {"postnorm": False})
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 336, "patch_size": 14}
    models = [
        kind({"text_config": SIZES | text, "vision_config": vision, **more}, torch.float32, torch.device("meta"))
        for kind, text, more in ((MiniMaxVL, published, {}), (LlavaNext, native, {"vision_feature_layer": -1}))
    ]
    assert models[0].spec == models[1].spec
    assert models[0].layers == models[1].layers
