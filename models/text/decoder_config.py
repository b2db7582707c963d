"""Builds a DecoderSpec from config.json, layer by layer, in flat (old) and nested (new) layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...callers.errors import ConfigError, SensoriumError
from ...checkpoints.config import check_activation, get_text_config, positive_int, positive_number
from .attention_config import attention_spec, latent_spec, layer_type
from .mlp_config import mlp_spec, moe_spec
from .spec import (
    AltUpSpec,
    AttentionSpec,
    ConvSpec,
    DecoderSpec,
    DeltaSpec,
    KdaSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    MambaSpec,
    MtpSpec,
    PerLayerSpec,
    SelectiveSpec,
    StateSpec,
)
from .stack import Stack

ALIASES = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "top_k_experts": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "shared_intermediate_size": "shared_expert_intermediate_size",
    "moe_num_shared_experts": "n_shared_experts",
    "qkv_bias": "attention_bias",
    "use_qkv_bias": "attention_bias",
    "layers_block_type": "layer_types",
    "interleave_moe_layer_step": "decoder_sparse_step",
}
"""Other names of a key -> the name that is read here."""

PER_MODALITY = ("num_experts", "num_experts_per_tok", "moe_layer_start_index", "moe_layer_end_index")
"""Keys that configs may repeat for each modality, or for each layer with equal values; the first value counts."""

_MTP_LAYERS = "num_nextn_predict_layers"
_OWN_MTP_LAYERS = "mtp_num_hidden_layers"  # where their names start with `mtp.`; Qwen3-Next stores a layer without the key


def decoder_spec(config: Mapping[str, Any], stack: Stack | None = None, **changes: Any) -> DecoderSpec:
    """Read the decoder from a whole config.json; `changes` override fields of DecoderSpec.

    Raises:
        ConfigError: a key is missing, unreadable or asks for an unsupported feature; the message names it.
    """
    stack = stack or Stack()
    aliases = {**ALIASES, **stack.aliases}
    text = {**stack.defaults, **{aliases.get(key, key): value for key, value in get_text_config(config).items()}}
    text |= {key: text[key][0] for key in PER_MODALITY if isinstance(text.get(key), list)}
    try:
        text |= {} if stack.derived is None else stack.derived(text)
        return replace(_read(config, text, stack), **changes)
    except SensoriumError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"the decoder's part of config.json cannot be read ({error})") from None


def _read(config: Mapping[str, Any], text: Mapping[str, Any], stack: Stack) -> DecoderSpec:
    hidden = positive_int(text, "hidden_size")
    count = len(text["layer_types"]) if stack.single and text.get("layer_types") else positive_int(text, "num_hidden_layers")
    layers = tuple(_layer(text, stack, i) for i in range(count))
    ropes = [layer.mixer.rope for layer in layers if isinstance(layer.mixer, AttentionSpec | LatentSpec)]
    scalings = [rope.scaling for rope in ropes if rope is not None]
    limits = [scaling["original_max_position_embeddings"] for scaling in scalings if "short_factor" in scaling]
    longest = positive_int({"max_position_embeddings": 32768, **text}, "max_position_embeddings")
    return DecoderSpec(
        vocab_size=positive_int(text, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        eps=positive_number({stack.eps_key: 1e-6, **text}, stack.eps_key),
        max_positions=min([longest, *limits]),
        tied=_tied(config, stack),
        norm=stack.norm,
        last_norm=stack.last_norm,
        norm_offset=stack.norm_offset,
        embed_scale=hidden**0.5 if stack.root_scale else text.get("embedding_multiplier", 1.0),
        residual_scale=text.get("residual_multiplier", 1.0),
        logit_scale=text.get("logit_scale") or 1.0 / text.get("logits_scaling", 1.0),
        logit_cap=text.get("final_logit_softcapping"),
        head_bias=bool(text.get(stack.head_bias, False)),
        mtp_layers=positive_int(text, _MTP_LAYERS) if text.get(_MTP_LAYERS) else 0,
        mtp=_mtp(text, stack, layers),
        per_layer=_per_layer(text, stack),
        scaled_layers=stack.scaled_layers,
        altup=_altup(text) if text.get("altup_num_inputs") else None,
        first_position=stack.first_position,
    )


def _mtp(text: Mapping[str, Any], stack: Stack, layers: Sequence[LayerSpec]) -> MtpSpec | None:
    """Return the layers for multi-token prediction, which are built like the last decoder layer with attention."""
    key = _OWN_MTP_LAYERS if stack.mtp == "mtp" else _MTP_LAYERS
    count = text.get(key, 1 if stack.mtp == "mtp" else 0)
    like = next((layer for layer in reversed(layers) if isinstance(layer.mixer, AttentionSpec | LatentSpec)), None)
    if stack.mtp is None or like is None or not count:
        return None
    return MtpSpec(positive_int({key: count}, key), like, stack.mtp)


def _altup(text: Mapping[str, Any]) -> AltUpSpec:
    streams, active = positive_int(text, "altup_num_inputs"), text["altup_active_idx"]
    if active not in range(streams):
        raise ConfigError(f"altup_active_idx in config.json is {active!r}; it must be from 0 to {streams - 1}")
    return AltUpSpec(streams, active, bool(text["altup_correct_scale"]), positive_int(text, "laurel_rank"))


def _per_layer(text: Mapping[str, Any], stack: Stack) -> PerLayerSpec | None:
    if not text.get("hidden_size_per_layer_input"):
        return None
    dim, vocab = positive_int(text, "hidden_size_per_layer_input"), positive_int(text, "vocab_size_per_layer_input")
    act = check_activation("hidden_activation", text["hidden_activation"])
    return PerLayerSpec(vocab, dim, act, text.get("pad_token_id") or 0 if stack.pads_encoder_rows else None)


def _tied(config: Mapping[str, Any], stack: Stack) -> bool:
    """Return True if the config or its text part ties the head; if neither says, the stack's default."""
    values = [part.get("tie_word_embeddings") for part in (config, get_text_config(config))]
    return any(values) if any(value is not None for value in values) else bool(stack.defaults.get("tie_word_embeddings"))


def _layer(text: Mapping[str, Any], stack: Stack, layer: int) -> LayerSpec:
    if not stack.single:
        mixer, mlp = _mixer(text, stack, layer), mlp_spec(text, stack, layer)
        residuals = None
        if "mlp_alpha_factor" in text:
            kind = "linear_attn" if isinstance(mixer, LightningSpec) else "full_attn"
            residuals = (_residual_factors(text, kind), _residual_factors(text, "mlp"))
        experts, second = (
            moe_spec(text, stack) if text.get("enable_moe_block") else None,
            _mamba(text) if stack.second_mixer else None,
        )
        norms = stack.state_norms or stack.norms if isinstance(mixer, StateSpec) else stack.norms
        if text.get("use_post_norm") is False:
            norms = (norms[0], None, norms[2], None)
        parallel = stack.parallel or bool(text.get("use_parallel_residual"))
        if parallel:
            norms = (norms[0], None, norms[2] if text.get("parallel_norms") == 2 else None, None)
        return LayerSpec(mixer, mlp, norms, parallel, experts, second, residuals=residuals)
    if layer_type(text, layer) in ("mlp", "moe"):
        return LayerSpec(None, mlp_spec(text, stack, layer), (None, None, "norm", None), path="mixer")
    return LayerSpec(_mixer(text, stack, layer), None, ("norm", None, None, None), path="mixer")


def _residual_factors(text: Mapping[str, Any], part: str) -> tuple[float, float]:
    return float(text[f"{part}_alpha_factor"]), float(text[f"{part}_beta_factor"])


def _mixer(text: Mapping[str, Any], stack: Stack, layer: int) -> AttentionSpec | LatentSpec | StateSpec:
    kind = layer_type(text, layer)
    if kind == "conv":
        return ConvSpec(positive_int(text, "conv_L_cache"), bool(text.get("conv_bias")))
    if kind in ("linear_attention", "mamba") and text.get("mamba_dt_rank"):
        return _mamba1(text)
    if kind in ("linear_attention", "mamba") and text.get("mamba_d_state"):
        return _mamba(text)
    if kind == "linear_attention" and "linear_attn_alpha_factor" in text:
        heads = positive_int(text, "num_attention_heads")
        dim = text.get("head_dim") or positive_int(text, "hidden_size") // heads
        return LightningSpec(heads, dim, layer, positive_int(text, "num_hidden_layers"), _mixer_act(text))
    if kind == "linear_attention" and "linear_num_heads" in text:
        heads, dim, taps = (positive_int(text, f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
        return KdaSpec(heads, dim, taps, _mixer_act(text))
    if kind == "linear_attention":
        names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        heads, key_heads, key_dim, value_dim, taps = (positive_int(text, f"linear_{name}") for name in names)
        most_beta = 2.0 if text.get("linear_allow_neg_eigval") else 1.0
        spec = DeltaSpec(heads, key_heads, key_dim, value_dim, taps, stack.state_norms is not None, most_beta, _mixer_act(text))
        if spec.heads % spec.key_heads:
            counts = f"linear_num_value_heads {spec.heads} is not a multiple of linear_num_key_heads {spec.key_heads}"
            raise ConfigError(f"{counts}; download config.json again")
        return spec
    if layer in (text.get("cross_attention_layers") or ()):
        return replace(attention_spec(text, stack, layer), rope=None, qk_norm="head", cross=True)
    return latent_spec(text, stack, layer) if text.get("kv_lora_rank") else attention_spec(text, stack, layer)


def _mixer_act(text: Mapping[str, Any]) -> str:
    """Return the activation after the convolution of a layer with a state."""
    key = "mamba_hidden_act" if "mamba_hidden_act" in text else "hidden_act"
    return check_activation(key, text.get(key, "silu"))


def _mamba1(text: Mapping[str, Any]) -> SelectiveSpec:
    eps = text.get("mixer_rms_eps")
    return SelectiveSpec(
        width=int(positive_number(text, "mamba_expand") * positive_int(text, "hidden_size")),
        state=positive_int(text, "mamba_d_state"),
        rank=positive_int(text, "mamba_dt_rank"),
        taps=positive_int(text, "mamba_d_conv"),
        conv_bias=bool(text["mamba_conv_bias"]),
        bias=bool(text["mamba_proj_bias"]),
        act=_mixer_act(text),
        norm_eps=None if eps is None else positive_number(text, "mixer_rms_eps"),
    )


def _mamba(text: Mapping[str, Any]) -> MambaSpec:
    heads, groups = positive_int(text, "mamba_n_heads"), positive_int(text, "mamba_n_groups")
    width = text.get("mamba_d_ssm") or text.get("mamba_expand", 0) * positive_int(text, "hidden_size")
    dim = width // heads if text.get("mamba_d_head") in (None, "auto") else positive_int(text, "mamba_d_head")
    if dim * heads != (width or dim * heads) or not dim or heads % groups:
        sizes = f"{heads} heads of {dim} numbers in {groups} groups for a width of {width}"
        raise ConfigError(f"config.json gives a Mamba layer {sizes}, which is impossible; download it again")
    limits = text.get("time_step_limit") or (0.0, math.inf)
    low, high = (float(limit["__float__"] if isinstance(limit, Mapping) else limit) for limit in limits)  # JSON has no infinity
    bias, into = bool(text["mamba_proj_bias"]), text.get("ssm_in_multiplier", 1.0)
    return MambaSpec(
        heads=heads,
        head_dim=dim,
        groups=groups,
        state=positive_int(text, "mamba_d_state"),
        taps=positive_int(text, "mamba_d_conv"),
        conv_bias=bool(text["mamba_conv_bias"]),
        bias=bias,
        out_bias=bool(text.get("projectors_bias", bias)),
        act=_mixer_act(text),
        step_limits=(low, high),
        norm=("before" if text.get("mamba_norm_before_gate") else "after") if text.get("mamba_rms_norm", True) else None,
        multipliers=tuple((1.0 if bias else into) * factor for factor in text.get("ssm_multipliers") or ()),
        in_scale=into if bias else 1.0,  # without a bias it is one with the factors of the result
        out_scale=text.get("ssm_out_multiplier", 1.0),
    )
