"""Published decoder-only stacks by model_type: defaults and features that their config.json does not state.

Source: the configuration and modelling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...kernels.activation import CLAMPED_SWIGLU
from ...mm.errors import ConfigError
from ..config import Stack, get_text_config
from .spec import hw_interleaved_sections

_BASE = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_LLAMA = _BASE | {"intermediate_size": 11008, "max_position_embeddings": 2048}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MINISTRAL3 = _MISTRAL | {
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": 262144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_INTERNLM3 = _LLAMA | {
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
_QWEN = _BASE | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE = _QWEN | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}
_GLM = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_GLM_MOE = _GLM | {
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": None,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
_GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
}
_ERNIE = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
_ERNIE_MOE = _ERNIE | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 6,
    "num_experts": 64,
    "n_shared_experts": 2,
    "moe_layer_start_index": 1,
}
_DEEPSEEK2 = _LLAMA | {
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "num_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "norm_topk_prob": False,
}
_DEEPSEEK3 = _DEEPSEEK2 | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
}
_QWEN2_MOE = _QWEN_MOE | {
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "attention_bias": True,
}
_MIXTRAL = _MISTRAL | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "rope_theta": 1e6,
}
_OLMOE = _LLAMA | {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
}
_OLMO2 = _LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5}
_OLMO3 = _OLMO2 | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500000.0}
_EXAONE4 = _LLAMA | {
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_SMOLLM3 = _LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}
_SEED_OSS = _LLAMA | {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
_HUNYUAN = _LLAMA | {"vocab_size": 290943, "rms_norm_eps": 1e-5}
_COHERE = _BASE | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_COHERE2 = _COHERE | {"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4}
_STABLELM = _BASE | {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}
_STARCODER2 = _BASE | {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}
_PHI3 = _LLAMA | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_GPT_OSS = _BASE | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "num_experts_per_tok": 4,
    "num_experts": 128,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
    },
}
_DOTS1 = _DEEPSEEK3 | {
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "kv_lora_rank": None,
    "num_experts": None,
    "n_shared_experts": None,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": None,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
_MINIMAX_M2 = _BASE | {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "rope_theta": 5000000.0,
}
_ERNIE_VL = _ERNIE_MOE | {"moe_intermediate_size": (1536, 512), "mrope_section": (22, 22, 20)}
_GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GLM_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SIGMOID = {"scoring": "sigmoid", "correction": True}
_CORRECTED = {"correction": True, "normalise": True}
_CLAMPED = {"act": CLAMPED_SWIGLU, "bias": True, "router_bias": True, "transposed": True, "interleaved": True}
_ERNIE_EXPERTS = {"modality_experts": ("text_moe", "vision_moe")}
_deepseek3 = Stack(_DEEPSEEK3, interleaved=True, router=_SIGMOID)
_cohere = Stack(
    _COHERE,
    norms=("input_layernorm", None, None, None),
    parallel=True,
    norm="layer without bias",
    eps_key="layer_norm_eps",
    interleaved=True,
    refused=("use_qk_norm",),
)
_gemma = Stack(_GEMMA, norm_offset=1.0, root_scale=True)

STACKS: Mapping[str, Stack] = {
    "llama": Stack(_LLAMA),
    "mistral": Stack(_MISTRAL),
    "ministral3": Stack(_MINISTRAL3),
    "internlm3": Stack(_INTERNLM3, refused=("bias", "qkv_bias")),
    "internlm2": Stack(_LLAMA | {"vocab_size": 103168, "attention_bias": True}),
    "qwen2": Stack(_QWEN, bias=True, out_bias=False),
    "qwen3": Stack(_QWEN | {"head_dim": 128}, qk_norm="head"),
    "qwen3_moe": Stack(_QWEN_MOE, qk_norm="head"),
    "glm": Stack(_GLM, out_bias=False, interleaved=True, fused=True),
    "glm4": Stack(_GLM, out_bias=False, norms=_GLM_NORMS, interleaved=True, fused=True),
    "glm4_moe": Stack(_GLM_MOE, out_bias=False, router=_SIGMOID),
    "gemma": _gemma,
    "gemma2": replace(_gemma, defaults=_GEMMA2, norms=_GEMMA_NORMS),
    "gemma3_text": replace(_gemma, defaults=_GEMMA3, norms=_GEMMA_NORMS, qk_norm="head"),
    "granite": Stack(_LLAMA | {"attention_multiplier": 1.0}),
    "granitemoe": Stack(_LLAMA | {"attention_multiplier": 1.0, "num_experts": 8, "num_experts_per_tok": 2}),
    "ernie4_5": Stack(_ERNIE | {"head_dim": 128}, interleaved=True),
    "ernie4_5_moe": Stack(_ERNIE_MOE, interleaved=True, router=_CORRECTED),
    "ernie4_5_vl_moe_text": Stack(
        _ERNIE_VL, interleaved=True, axes=hw_interleaved_sections, router=_CORRECTED | _ERNIE_EXPERTS
    ),
    "deepseek_v2": Stack(_DEEPSEEK2, interleaved=True, router={"group_score": "max"}),
    "deepseek_v3": _deepseek3,
    "kimi_k2": _deepseek3,
    "mixtral": Stack(_MIXTRAL),
    "olmoe": Stack(_OLMOE, qk_norm="all", refused=("clip_qkv",)),
    "olmo2": Stack(_OLMO2, qk_norm="all", norms=_POST_NORMS),
    "olmo3": Stack(_OLMO3, qk_norm="all", norms=_POST_NORMS, scaled_windows=False),
    "exaone4": Stack(_EXAONE4, qk_norm="head", norms=_POST_NORMS, windows_rotate=True),
    "qwen2_moe": Stack(_QWEN2_MOE, out_bias=False, router={"shared_gate": True}, refused=("use_sliding_window",)),
    "smollm3": Stack(_SMOLLM3),
    "seed_oss": Stack(_SEED_OSS),
    "hunyuan_v1_dense": Stack(_HUNYUAN, qk_norm="rotated"),
    "cohere": _cohere,
    "cohere2": replace(_cohere, defaults=_COHERE2, windows_rotate=True),
    "stablelm": Stack(
        _STABLELM, out_bias=False, norm="layer", eps_key="layer_norm_eps", refused=("qk_layernorm", "use_parallel_residual")
    ),
    "starcoder2": Stack(_STARCODER2, norm="layer", eps_key="norm_epsilon", plain=("c_fc", "c_proj")),
    "phi3": Stack(_PHI3, fused=True, fused_qkv=True),
    "dots1": Stack(_DOTS1, qk_norm="head", router=_SIGMOID),
    "minimax_m2": Stack(_MINIMAX_M2, qk_norm="all", router=_SIGMOID | {"normalise": True}),
    "gpt_oss": Stack(_GPT_OSS, sinks=True, router=_CLAMPED, fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702}),
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
