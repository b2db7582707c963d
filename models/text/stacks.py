"""Published decoder-only stacks by model_type: features that their config.json does not state.

Source: the modelling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...kernels.activation import CLAMPED_SWIGLU
from ...mm.errors import ConfigError
from ..config import Stack, get_text_config
from . import stack_defaults as defaults
from .spec import hw_interleaved_sections

_GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GLM_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SIGMOID = {"scoring": "sigmoid", "correction": True}
_CORRECTED = {"correction": True, "normalise": True}
_CLAMPED = {"act": CLAMPED_SWIGLU, "bias": True, "router_bias": True, "transposed": True, "interleaved": True}
_ERNIE_EXPERTS = {"modality_experts": ("text_moe", "vision_moe")}
_deepseek3 = Stack(defaults.DEEPSEEK3, interleaved=True, router=_SIGMOID)
_cohere = Stack(
    defaults.COHERE,
    norms=("input_layernorm", None, None, None),
    parallel=True,
    norm="layer without bias",
    eps_key="layer_norm_eps",
    interleaved=True,
    refused=("use_qk_norm",),
)
_gemma = Stack(defaults.GEMMA, norm_offset=1.0, root_scale=True)

STACKS: Mapping[str, Stack] = {
    "llama": Stack(defaults.LLAMA),
    "mistral": Stack(defaults.MISTRAL),
    "ministral3": Stack(defaults.MINISTRAL3),
    "internlm3": Stack(defaults.INTERNLM3, refused=("bias", "qkv_bias")),
    "internlm2": Stack(defaults.LLAMA | {"vocab_size": 103168, "attention_bias": True}),
    "qwen2": Stack(defaults.QWEN, bias=True, out_bias=False),
    "qwen3": Stack(defaults.QWEN | {"head_dim": 128}, qk_norm="head"),
    "qwen3_moe": Stack(defaults.QWEN_MOE, qk_norm="head"),
    "glm": Stack(defaults.GLM, out_bias=False, interleaved=True, fused=True),
    "glm4": Stack(defaults.GLM, out_bias=False, norms=_GLM_NORMS, interleaved=True, fused=True),
    "glm4_moe": Stack(defaults.GLM_MOE, out_bias=False, router=_SIGMOID),
    "gemma": _gemma,
    "gemma2": replace(_gemma, defaults=defaults.GEMMA2, norms=_GEMMA_NORMS),
    "gemma3_text": replace(_gemma, defaults=defaults.GEMMA3, norms=_GEMMA_NORMS, qk_norm="head"),
    "granite": Stack(defaults.LLAMA | {"attention_multiplier": 1.0}),
    "granitemoe": Stack(defaults.LLAMA | {"attention_multiplier": 1.0, "num_experts": 8, "num_experts_per_tok": 2}),
    "ernie4_5": Stack(defaults.ERNIE | {"head_dim": 128}, interleaved=True),
    "ernie4_5_moe": Stack(defaults.ERNIE_MOE, interleaved=True, router=_CORRECTED),
    "ernie4_5_vl_moe_text": Stack(
        defaults.ERNIE_VL, interleaved=True, axes=hw_interleaved_sections, router=_CORRECTED | _ERNIE_EXPERTS
    ),
    "deepseek_v2": Stack(defaults.DEEPSEEK2, interleaved=True, router={"group_score": "max"}),
    "deepseek_v3": _deepseek3,
    "kimi_k2": _deepseek3,
    "mistral4": Stack(defaults.MISTRAL4, interleaved=True),
    "mixtral": Stack(defaults.MIXTRAL),
    "olmoe": Stack(defaults.OLMOE, qk_norm="all", refused=("clip_qkv",)),
    "olmo2": Stack(defaults.OLMO2, qk_norm="all", norms=_POST_NORMS),
    "olmo3": Stack(defaults.OLMO3, qk_norm="all", norms=_POST_NORMS, scaled_windows=False),
    "exaone4": Stack(defaults.EXAONE4, qk_norm="head", norms=_POST_NORMS, windows_rotate=True),
    "qwen2_moe": Stack(defaults.QWEN2_MOE, out_bias=False, router={"shared_gate": True}, refused=("use_sliding_window",)),
    "smollm3": Stack(defaults.SMOLLM3),
    "seed_oss": Stack(defaults.SEED_OSS),
    "hunyuan_v1_dense": Stack(defaults.HUNYUAN, qk_norm="rotated"),
    "cohere": _cohere,
    "cohere2": replace(_cohere, defaults=defaults.COHERE2, windows_rotate=True),
    "stablelm": Stack(
        defaults.STABLELM,
        out_bias=False,
        norm="layer",
        eps_key="layer_norm_eps",
        refused=("qk_layernorm", "use_parallel_residual"),
    ),
    "starcoder2": Stack(defaults.STARCODER2, norm="layer", eps_key="norm_epsilon", plain=("c_fc", "c_proj")),
    "phi3": Stack(defaults.PHI3, fused=True, fused_qkv=True),
    "dots1": Stack(defaults.DOTS1, qk_norm="head", router=_SIGMOID),
    "nemotron": Stack(defaults.NEMOTRON, norm="layer", norm_offset=1.0, eps_key="norm_eps", plain=("up_proj", "down_proj")),
    "arcee": Stack(defaults.ARCEE, plain=("up_proj", "down_proj")),
    "phimoe": Stack(defaults.PHIMOE, norm="layer", router={"scoring": "sparsemixer"}, fixed={"num_experts_per_tok": 2}),
    "hunyuan_v1_moe": Stack(defaults.HUNYUAN_MOE, qk_norm="rotated", refused=("use_cla",)),
    "granitemoeshared": Stack(defaults.LLAMA | {"attention_multiplier": 1.0, "num_experts": 8, "num_experts_per_tok": 2}),
    "solar_open": Stack(defaults.SOLAR_OPEN, out_bias=False, router=_SIGMOID),
    "exaone_moe": Stack(defaults.EXAONE_MOE, qk_norm="head", windows_rotate=True, router=_SIGMOID),
    "helium": Stack(defaults.HELIUM, out_bias=False, interleaved=True),
    "minimax_m2": Stack(defaults.MINIMAX_M2, qk_norm="all", router=_SIGMOID | {"normalise": True}),
    "gpt_oss": Stack(defaults.GPT_OSS, sinks=True, router=_CLAMPED, fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702}),
}


def stack_of(config: Mapping[str, Any], default: str = "llama") -> Stack:
    """Return the stack of a config.json's text part, for families that accept several decoders.

    Raises:
        ConfigError: the model_type is not in the table, or the config asks for a feature that the stack lacks.
    """
    text = get_text_config(config)
    name = text.get("model_type", default)
    if name not in STACKS:
        raise ConfigError(f"text_config of model_type {name!r} is not supported; known are {', '.join(STACKS)}")
    refused = [key for key in STACKS[name].refused if text.get(key)]
    if refused:
        raise ConfigError(f"{refused[0]} in the config of a {name} decoder must be false; true is not supported")
    for key, value in STACKS[name].fixed.items():
        if text.get(key, value) != value:
            raise ConfigError(f"{key} in the config of a {name} decoder is {text[key]!r}; only {value} is supported")
    return STACKS[name]
