"""Published decoder-only stacks by model_type: features that their config.json does not state.

Source: the modelling files of transformers 5.23.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...callers.errors import ConfigError
from ...checkpoints.config import get_text_config
from ...kernels.activation.reference import CLAMPED_SWIGLU
from . import stack_defaults as defaults
from .spec import hw_interleaved_sections, interleaved_sections
from .stack import Stack
from .stack_keys import falcon_keys, kimi_linear_keys, mamba_keys

_GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GLM_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SIGMOID = {"scoring": "sigmoid", "correction": True}
_CORRECTED = {"correction": True, "normalise": True}
_CLAMPED = {"act": CLAMPED_SWIGLU, "bias": True, "router_bias": True, "transposed": True, "interleaved": True}
_LLAMA4_EXPERTS = {"scoring": "sigmoid", "normalise": False, "transposed": True, "scaled_inputs": True}
_ERNIE_EXPERTS = {"modality_experts": ("text_moe", "vision_moe")}
_GRANITE4_NAMES = ((".shared_mlp.input_linear.", ".mlp.gate_up_proj."), (".shared_mlp.output_linear.", ".mlp.down_proj."))
_GEMMA4_NAMES = (
    (".router.scale", ".beside.router_norm.weight"),
    (".router.per_expert_scale", ".beside.mixture.expert_scale"),
    (".router.proj.", ".beside.mixture.gate."),
    (".experts.", ".beside.mixture.experts."),
    (".pre_feedforward_layernorm_2.", ".beside.before."),
    (".post_feedforward_layernorm_1.", ".beside.after_mlp."),
    (".post_feedforward_layernorm_2.", ".beside.after."),
)
_KIMI_LINEAR_NAMES = (
    (".forget_gate.", "."),
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
_LFM2_NAMES = (
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn.q_layernorm.", ".self_attn.q_norm."),
    (".self_attn.k_layernorm.", ".self_attn.k_norm."),
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
_STEP3_NAMES = (
    *((f".moe.{part}.weight", f".mlp.experts.{part}") for part in ("gate_proj", "up_proj", "down_proj")),
    (".moe.", ".mlp."),
    (".share_expert.", ".mlp.shared_experts."),
)
_SHARED = "shared_expert_intermediate_size"
_STEP3_KEYS = {
    "moe_top_k": "num_experts_per_tok",
    "norm_expert_weight": "norm_topk_prob",
    "share_expert_dim": _SHARED,
    "moe_layers_enum": "moe_layers",
    "num_attention_groups": "num_key_value_heads",
    "max_position_embedding": "max_position_embeddings",
}
_BAMBA_NAMES = ((".feed_forward.", ".mlp."),)
_OPT_NAMES = (
    ("decoder.", ""),
    (".out_proj.", ".o_proj."),
    (".fc1.", ".mlp.fc1."),
    (".fc2.", ".mlp.fc2."),
)
_FALCON_NAMES = (
    ("word_embeddings.", "embed_tokens."),
    (".h.", ".layers."),
    (".self_attention.", ".self_attn."),
    (".dense.", ".o_proj."),
    (".ln_attn.", ".input_layernorm."),
    (".ln_mlp.", ".post_attention_layernorm."),
)
_BACKBONE_NAMES = (("embeddings.", "embed_tokens."),)
_MAMBA_KEYS = {
    "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_size": "mamba_d_state", "hidden_act": "mamba_hidden_act",
}  # fmt: skip
_MAMBA1_KEYS = {
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "time_step_rank": "mamba_dt_rank",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "hidden_act": "mamba_hidden_act",
}
_NEMOTRON_KEYS = {
    "hybrid_override_pattern": "layer_types",
    "attention_head_dim": "head_dim",
    "mlp_hidden_act": "hidden_act",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
_mamba = Stack(
    defaults.MAMBA,
    eps_key="layer_norm_epsilon",
    single=True,
    last_norm="norm_f",
    renames=_BACKBONE_NAMES,
    aliases=_MAMBA1_KEYS,
    derived=mamba_keys,
)
_deepseek3 = Stack(defaults.DEEPSEEK3, interleaved=True, router=_SIGMOID, mtp="layers")
_cohere = Stack(
    defaults.COHERE,
    norms=("input_layernorm", None, None, None),
    parallel=True,
    norm="layer without bias",
    eps_key="layer_norm_eps",
    interleaved=True,
)
_lfm2 = Stack(
    defaults.LFM2,
    qk_norm="head",
    norms=("operator_norm", None, "ffn_norm", None),
    last_norm="embedding_norm",
    eps_key="norm_eps",
    renames=_LFM2_NAMES,
)
_minimax = Stack(
    defaults.MINIMAX,
    aliases={
        "attn_type_list": "layer_types",
        **{
            f"layernorm_{long}_{name}": f"{short}_{name}_factor"
            for long, short in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
            for name in ("alpha", "beta")
        },
    },
    fixed={"postnorm": True},
)
_qwen3_next = Stack(defaults.QWEN3_NEXT, qk_norm="head", gated=True, norm_offset=1.0, router={"shared_gate": True}, mtp="mtp")
# hidden_act and mlp_bias are of the shared expert alone
_aria = Stack(defaults.ARIA, router={"transposed": True, "act": "silu"})
_gemma = Stack(defaults.GEMMA, norm_offset=1.0, root_scale=True)
_gemma4 = Stack(
    defaults.GEMMA4,
    norms=_GEMMA_NORMS,
    qk_norm="head",
    root_scale=True,
    value_norm=True,
    scaled_layers=True,
    pads_encoder_rows=True,
    router={"expert_scale": True},
    renames=_GEMMA4_NAMES,
    bidirectional="all",
)

STACKS: Mapping[str, Stack] = {
    "llama": Stack(defaults.LLAMA),
    "llama4_text": Stack(
        defaults.LLAMA4,
        qk_norm="plain",
        interleaved=True,
        router=_LLAMA4_EXPERTS,
        renames=((".feed_forward.", ".mlp."),),
    ),
    "mllama_text_model": Stack(defaults.MLLAMA),
    "cwm": Stack(defaults.CWM),
    "iquestcoder": Stack(defaults.IQUEST_CODER),
    "jais2": Stack(defaults.JAIS2, norm="layer", eps_key="layer_norm_eps", plain=("up_proj", "down_proj")),
    "ministral": Stack(defaults.MISTRAL),
    "mistral": Stack(defaults.MISTRAL),
    "ministral3": Stack(defaults.MINISTRAL3),
    "internlm3": Stack(defaults.INTERNLM3, aliases={"bias": "use_bias"}),
    "internlm2": Stack(defaults.LLAMA | {"vocab_size": 103168, "attention_bias": True}),
    "qwen2": Stack(defaults.QWEN, bias=True, out_bias=False),
    "qwen3": Stack(defaults.QWEN | {"head_dim": 128}, qk_norm="head"),
    "qwen3_moe": Stack(defaults.QWEN_MOE, qk_norm="head"),
    "glm": Stack(defaults.GLM, out_bias=False, interleaved=True, fused=True),
    "glm4": Stack(defaults.GLM, out_bias=False, norms=_GLM_NORMS, interleaved=True, fused=True),
    "glm4_moe": Stack(defaults.GLM_MOE, out_bias=False, router=_SIGMOID, mtp="layers"),
    "glm4_moe_lite": replace(_deepseek3, defaults=defaults.GLM_MOE_LITE),
    "gemma": _gemma,
    "gemma2": replace(_gemma, defaults=defaults.GEMMA2, norms=_GEMMA_NORMS),
    "vaultgemma": replace(_gemma, defaults=defaults.GEMMA2, norms=("input_layernorm", None, "pre_feedforward_layernorm", None)),
    "gemma3_text": replace(_gemma, defaults=defaults.GEMMA3, norms=_GEMMA_NORMS, qk_norm="head", bidirectional=True),
    "gemma3n_text": Stack(defaults.GEMMA3N, norms=_GEMMA_NORMS, qk_norm="head", root_scale=True, value_norm=True),
    "gemma4_text": _gemma4,
    "gemma4_unified_text": replace(_gemma4, defaults=defaults.GEMMA4_UNIFIED),
    "granite": Stack(defaults.LLAMA | {"attention_multiplier": 1.0}),
    "granitemoe": Stack(defaults.LLAMA | {"attention_multiplier": 1.0, "num_experts": 8, "num_experts_per_tok": 2}),
    "ernie4_5": Stack(defaults.ERNIE | {"head_dim": 128}, interleaved=True),
    "ernie4_5_moe": Stack(defaults.ERNIE_MOE, interleaved=True, router=_CORRECTED, head_bias="use_bias"),
    "ernie4_5_vl_moe_text": Stack(
        defaults.ERNIE_VL, interleaved=True, axes=hw_interleaved_sections, router=_CORRECTED | _ERNIE_EXPERTS
    ),
    "deepseek_v2": Stack(defaults.DEEPSEEK2, interleaved=True, router={"group_score": "max"}),
    "deepseek_v3": _deepseek3,
    "deepseek_v32": replace(_deepseek3, defaults=defaults.DEEPSEEK32, mtp=None),
    "glm_moe_dsa": replace(_deepseek3, defaults=defaults.GLM_MOE_DSA, mtp=None, index_interleaved=True),
    "kimi_k2": _deepseek3,
    "kimi_linear": Stack(
        defaults.KIMI_LINEAR,
        router=_SIGMOID,
        renames=_KIMI_LINEAR_NAMES,
        aliases={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts_per_token": "num_experts_per_tok",
        },
        derived=kimi_linear_keys,
        fixed={"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
    ),
    "youtu": replace(_deepseek3, defaults=defaults.YOUTU, router={}, mtp=None),
    "mistral4": Stack(defaults.MISTRAL4, interleaved=True),
    "mixtral": Stack(defaults.MIXTRAL),
    "olmoe": Stack(defaults.OLMOE, qk_norm="all"),
    "flex_olmo": Stack(defaults.FLEX_OLMO, qk_norm="all", norms=_POST_NORMS),
    "olmo2": Stack(defaults.OLMO2, qk_norm="all", norms=_POST_NORMS),
    "olmo3": Stack(defaults.OLMO3, qk_norm="all", norms=_POST_NORMS, scaled_windows=False),
    "olmo_hybrid": Stack(
        defaults.OLMO_HYBRID,
        qk_norm="all",
        norms=_POST_NORMS,
        state_norms=("attention_layer_norm", None, "post_attention_layernorm", None),
        renames=(("input_layernorm", "attention_layer_norm"), ("feedforward_layer_norm", "post_attention_layernorm")),
    ),
    "exaone4": Stack(defaults.EXAONE4, qk_norm="head", norms=_POST_NORMS, windows_rotate=True),
    "qwen2_moe": Stack(defaults.QWEN2_MOE, out_bias=False, router={"shared_gate": True}),
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
        renames=tuple((f".{part}_layernorm.norms.", f".{part}_norm.") for part in "qk"),
        aliases={"qk_layernorm": "use_qk_norm"},
    ),
    "starcoder2": Stack(defaults.STARCODER2, norm="layer", eps_key="norm_epsilon", plain=("c_fc", "c_proj")),
    "phi3": Stack(defaults.PHI3, fused=True, fused_qkv=True),
    "dots1": Stack(defaults.DOTS1, qk_norm="head", router=_SIGMOID),
    "nemotron": Stack(defaults.NEMOTRON, norm="layer", norm_offset=1.0, eps_key="norm_eps", plain=("up_proj", "down_proj")),
    "arcee": Stack(defaults.ARCEE, plain=("up_proj", "down_proj")),
    "phimoe": Stack(defaults.PHIMOE, norm="layer", router={"scoring": "sparsemixer"}, fixed={"num_experts_per_tok": 2}),
    "hunyuan_v1_moe": Stack(defaults.HUNYUAN_MOE, qk_norm="rotated", refused=("use_cla",)),
    "granitemoeshared": Stack(defaults.LLAMA | {"attention_multiplier": 1.0, "num_experts": 8, "num_experts_per_tok": 2}),
    "hyperclovax": Stack(
        defaults.LLAMA | {"use_post_norm": True},
        norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        aliases={"logits_scaling": "logit_scale"},
    ),
    "solar_open": Stack(defaults.SOLAR_OPEN, out_bias=False, router=_SIGMOID),
    "exaone_moe": Stack(defaults.EXAONE_MOE, qk_norm="head", windows_rotate=True, router=_SIGMOID),
    "helium": Stack(defaults.HELIUM, out_bias=False, interleaved=True),
    "minimax": _minimax,
    "minimax_m1": _minimax,
    "minimax_text_01": _minimax,
    "minimax_m2": Stack(defaults.MINIMAX_M2, qk_norm="all", router=_SIGMOID | {"normalise": True}),
    "lfm2": _lfm2,
    "lfm2_moe": replace(
        _lfm2,
        defaults=defaults.LFM2_MOE,
        router=_SIGMOID,
        aliases={"num_dense_layers": "first_k_dense_replace"},
    ),
    "bamba": Stack(
        defaults.BAMBA,
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        last_norm="final_layernorm",
        renames=_BAMBA_NAMES,
        aliases={"attn_layer_indices": "full_attn_idxs"},
    ),
    "falcon_h1": Stack(
        defaults.FALCON_H1,
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        second_mixer=True,
        last_norm="final_layernorm",
        renames=_BAMBA_NAMES,
        aliases={"lm_head_multiplier": "logit_scale"},
    ),
    "nemotron_h": Stack(
        defaults.NEMOTRON_H,
        bias=False,
        out_bias=False,
        eps_key="layer_norm_epsilon",
        plain=("up_proj", "down_proj"),
        router=_SIGMOID,
        single=True,
        last_norm="norm_f",
        renames=_BACKBONE_NAMES,
        aliases=_NEMOTRON_KEYS,
    ),
    "mamba": _mamba,
    "falcon_mamba": replace(_mamba, defaults=defaults.MAMBA | {"mixer_rms_eps": 1e-6}),
    "mamba2": Stack(
        defaults.MAMBA2,
        eps_key="layer_norm_epsilon",
        single=True,
        last_norm="norm_f",
        renames=_BACKBONE_NAMES,
        aliases=_NEMOTRON_KEYS | _MAMBA_KEYS,
    ),
    "step3_text": Stack(
        defaults.STEP3,
        bias=False,
        out_bias=False,
        renames=_STEP3_NAMES,
        aliases=_STEP3_KEYS,
        fixed={"num_attention_groups": 1, "hidden_act": "silu"},
    ),
    "step3p5": Stack(
        defaults.STEP3P5,
        qk_norm="head",
        norm_offset=1.0,
        head_gate=True,
        router=_SIGMOID,
        renames=((".moe.router_bias", ".mlp.gate.e_score_correction_bias"), *_STEP3_NAMES),
        aliases=_STEP3_KEYS | {"moe_router_scaling_factor": "routed_scaling_factor", "share_expert_dims": _SHARED},
        fixed={"attention_bias": False, "mlp_bias": False, "gating": True, "use_head_wise_attn_gate": True},
    ),
    "falcon": Stack(
        defaults.FALCON,
        norms=("input_layernorm", None, "post_attention_layernorm", None),
        norm="layer",
        last_norm="ln_f",
        eps_key="layer_norm_epsilon",
        plain=("dense_h_to_4h", "dense_4h_to_h"),
        grouped_qkv="query_key_value",
        renames=_FALCON_NAMES,
        aliases={"activation": "hidden_act", "bias": "use_bias", "n_embed": "hidden_size"},
        derived=falcon_keys,
        refused=("alibi",),
    ),
    "opt": Stack(
        defaults.OPT,
        norms=("self_attn_layer_norm", None, "final_layer_norm", None),
        norm="layer",
        last_norm="final_layer_norm",
        eps_key="layer_norm_eps",
        plain=("fc1", "fc2"),
        first_position=2,
        renames=_OPT_NAMES,
        aliases={"ffn_dim": "intermediate_size", "activation_function": "hidden_act", "enable_bias": "use_bias"},
        fixed={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        equal=(("word_embed_proj_dim", "hidden_size"),),
    ),
    "aria_text": _aria,
    "aria_moe_lm": _aria,
    "granitemoehybrid": Stack(defaults.GRANITE4, fused=True, renames=_GRANITE4_NAMES),
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": replace(_qwen3_next, defaults=defaults.QWEN3_5, axes=interleaved_sections, router={}),
    "qwen3_5_moe_text": replace(_qwen3_next, defaults=defaults.QWEN3_5_MOE, axes=interleaved_sections),
    "gpt_oss": Stack(defaults.GPT_OSS, sinks=True, router=_CLAMPED),
}


def replace_parts(name: str, renames: Sequence[tuple[str, str]]) -> str:
    """Return a tensor's name with parts of it replaced, see `Stack.renames`."""
    for old, new in renames:
        name = name.replace(old, new)
    return name


def stack_of(config: Mapping[str, Any], default: str = "llama") -> Stack:
    """Return the stack of a config.json's text part, for families that accept several decoders.

    Raises:
        ConfigError: the model_type is not in the table, or the config asks for a feature that the stack lacks.
    """
    text = get_text_config(config)
    name = text.get("model_type", default)
    if name not in STACKS:
        near = difflib.get_close_matches(str(name), STACKS, n=3, cutoff=0.5) or ("llama", "qwen3", "mistral")
        choice = f"{', '.join(near)} and {len(STACKS) - len(near)} others (docs/models.md)"
        raise ConfigError(f"text_config of model_type {name!r} is not supported; known are {choice}")
    refused = [key for key in STACKS[name].refused if text.get(key)]
    if refused:
        raise ConfigError(f"{refused[0]} in the config of a {name} decoder must be false; true is not supported")
    for key, value in STACKS[name].fixed.items():
        if text.get(key, value) != value:
            raise ConfigError(f"{key} in the config of a {name} decoder is {text[key]!r}; only {value} is supported")
    for first, second in STACKS[name].equal:
        value = text.get(second, STACKS[name].defaults[second])
        if text.get(first) not in (None, value):
            raise ConfigError(
                f"{first} in the config of a {name} decoder is {text[first]!r}; only {second}, {value}, is supported"
            )
    return STACKS[name]
