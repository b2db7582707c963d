"""Reads and checks config.json, in flat (old) and nested (new) layouts, and builds a DecoderSpec from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..kernels.activation import REFERENCES, UNGATED
from ..mm.errors import ConfigError, SensoriumError, typed
from .text.rope import scaling_type, yarn_mscale
from .text.spec import (
    AltUpSpec,
    AttentionSpec,
    ConvSpec,
    DecoderSpec,
    DeltaSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    MtpSpec,
    PerLayerSpec,
    RopeSpec,
    StateSpec,
    chunked_sections,
    interleaved_sections,
)
from .text.stack import Stack

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

SECTIONS = frozenset(
    f"{part}_config"
    for part in (
        "audio", "audio_encoder", "encoder", "language", "llm", "perceiver", "projector", "qformer", "text", "thinker",
        "vision",
    )
)  # fmt: skip
"""Keys of config.json that are read as sections. Other keys with such an ending may hold anything."""

PER_MODALITY = ("num_experts", "num_experts_per_tok", "moe_layer_start_index", "moe_layer_end_index")
"""Keys that configs may repeat for each modality, or for each layer with equal values; the first value counts."""
_ACTIVATION_NAMES = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
"""Other names of activation functions."""

_COUNT_KEYS, _MAX_COUNT = ("layers", "depth", "experts"), 4096  # a larger count would build modules forever
_MAX_HEAD_DIM = 1 << 14
_CHUNKED = "chunked_attention"
_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""sentence-transformers' name of a pooling -> ours."""
_AXES = (1, 3, 4)  # numbers of position axes: one; time, height, width; or a text axis and these three


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a config.json: the first nested section of three names, or all of it (or of its thinker)."""
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, Mapping) else config
    nested = (config.get(key) for key in ("text_config", "language_config", "llm_config"))
    return next((part for part in nested if isinstance(part, Mapping)), config)


def unnest(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of its `vlm_config`, under which retrieval models nest the model that they wrap."""
    inner = config.get("vlm_config")
    outer = {key: value for key, value in config.items() if key != "vlm_config"}
    return {**inner, **outer} if isinstance(inner, Mapping) else outer


def check_activation(key: str, act: str, gated: bool = True) -> str:
    """Return our name of the activation `act`, the config's value under `key`; ConfigError if it is not supported."""
    known, act = REFERENCES if gated else REFERENCES | UNGATED, _ACTIVATION_NAMES.get(act, act)
    if act not in known:
        raise ConfigError(f"{key} {act!r} is not supported; known are {', '.join(known)}")
    return act


def check_parts(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a section of config.json that is not an object, or for an absurd number of layers or experts."""
    for key, value in config.items():
        if key in SECTIONS and not isinstance(value, Mapping | None):
            raise ConfigError(f"{key} in config.json is {typed(value)}; it must be an object")
        if isinstance(value, Mapping):
            check_parts(value)
        elif any(word in key for word in _COUNT_KEYS):
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number > _MAX_COUNT:
                    raise ConfigError(f"{key} in config.json is {number:.3g}, the limit is {_MAX_COUNT}; download it again")


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
        head_bias=bool(text.get("lm_head_bias", False)),
        mtp_layers=positive_int(text, _MTP_LAYERS) if text.get(_MTP_LAYERS) else 0,
        mtp=_mtp(text, stack, layers),
        per_layer=_per_layer(text, stack),
        scaled_layers=stack.scaled_layers,
        altup=_altup(text) if text.get("altup_num_inputs") else None,
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
        mixer, mlp = _mixer(text, stack, layer), _mlp(text, stack, layer)
        residuals = None
        if "mlp_alpha_factor" in text:
            own = "linear_attn" if isinstance(mixer, LightningSpec) else "full_attn"
            residuals = (_residual_factors(text, own), _residual_factors(text, "mlp"))
        experts, second = (
            _moe(text, stack) if text.get("enable_moe_block") else None,
            _mamba(text) if stack.second_mixer else None,
        )
        norms = stack.state_norms or stack.norms if isinstance(mixer, StateSpec) else stack.norms
        return LayerSpec(mixer, mlp, norms, stack.parallel, experts, second, residuals=residuals)
    if _layer_type(text, layer) in ("mlp", "moe"):
        return LayerSpec(None, _mlp(text, stack, layer), (None, None, "norm", None), path="mixer")
    return LayerSpec(_mixer(text, stack, layer), None, ("norm", None, None, None), path="mixer")


def _residual_factors(text: Mapping[str, Any], part: str) -> tuple[float, float]:
    return float(text[f"{part}_alpha_factor"]), float(text[f"{part}_beta_factor"])


def _mixer(text: Mapping[str, Any], stack: Stack, layer: int) -> AttentionSpec | LatentSpec | StateSpec:
    kind = _layer_type(text, layer)
    if kind == "conv":
        return ConvSpec(positive_int(text, "conv_L_cache"), bool(text.get("conv_bias")))
    if kind in ("linear_attention", "mamba") and text.get("mamba_d_state"):
        return _mamba(text)
    if kind == "linear_attention" and "linear_attn_alpha_factor" in text:
        heads = positive_int(text, "num_attention_heads")
        dim = text.get("head_dim") or positive_int(text, "hidden_size") // heads
        return LightningSpec(heads, dim, layer, positive_int(text, "num_hidden_layers"))
    if kind == "linear_attention":
        names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        heads, key_heads, key_dim, value_dim, taps = (positive_int(text, f"linear_{name}") for name in names)
        spec = DeltaSpec(heads, key_heads, key_dim, value_dim, taps, stack.state_norms is not None)
        if spec.heads % spec.key_heads:
            counts = f"linear_num_value_heads {spec.heads} is not a multiple of linear_num_key_heads {spec.key_heads}"
            raise ConfigError(f"{counts}; download config.json again")
        return spec
    if layer in (text.get("cross_attention_layers") or ()):
        return replace(_attention(text, stack, layer), rope=None, qk_norm="head", cross=True)
    return _latent(text, stack) if text.get("kv_lora_rank") else _attention(text, stack, layer)


def _mamba(text: Mapping[str, Any]) -> MambaSpec:
    heads, groups = positive_int(text, "mamba_n_heads"), positive_int(text, "mamba_n_groups")
    width = text.get("mamba_d_ssm") or text.get("mamba_expand", 0) * positive_int(text, "hidden_size")
    dim = width // heads if text.get("mamba_d_head") in (None, "auto") else positive_int(text, "mamba_d_head")
    if dim * heads != (width or dim * heads) or not dim or heads % groups:
        sizes = f"{heads} heads of {dim} numbers in {groups} groups for a width of {width}"
        raise ConfigError(f"config.json gives a Mamba layer {sizes}, which is impossible; download it again")
    limits = text.get("time_step_limit") or (0.0, math.inf)
    low, high = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in limits)  # JSON has no infinity
    return MambaSpec(
        heads=heads,
        head_dim=dim,
        groups=groups,
        state=positive_int(text, "mamba_d_state"),
        taps=positive_int(text, "mamba_d_conv"),
        conv_bias=bool(text["mamba_conv_bias"]),
        bias=bool(text["mamba_proj_bias"]),
        step_limits=(low, high),
        norm=("before" if text.get("mamba_norm_before_gate") else "after") if text.get("mamba_rms_norm", True) else None,
        multipliers=tuple(text.get("ssm_in_multiplier", 1.0) * one for one in text.get("ssm_multipliers") or ()),
        out_scale=text.get("ssm_out_multiplier", 1.0),
    )


_PATTERN = {
    "M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "hybrid": "attention", "0": "linear_attention", "1": "attention",
}  # fmt: skip
"""Other layer types -> those read here: letters (Nemotron-H), both mixers in each layer (Falcon-H1), numbers (MiniMax)."""


def _layer_type(text: Mapping[str, Any], layer: int) -> str | None:
    """Return a layer's type, listed in the config or derived from other keys of it; None if only windows tell layers apart."""
    if text.get("layer_types"):
        kind = str(text["layer_types"][layer])
        return _PATTERN.get(kind, kind)
    if text.get("full_attn_idxs") is not None:
        other = "conv" if text.get("conv_L_cache") else "linear_attention"
        return "full_attention" if layer in text["full_attn_idxs"] else other
    if text.get("mamba_d_state"):
        return "linear_attention"
    if text.get("attention_chunk_size"):
        return "full_attention" if _listed_rope(text, layer) is False else _CHUNKED
    if text.get("full_attention_interval"):
        return "linear_attention" if (layer + 1) % positive_int(text, "full_attention_interval") else "full_attention"
    return None


def _attention(text: Mapping[str, Any], stack: Stack, layer: int) -> AttentionSpec:
    text = _layer_keys(text, layer)
    if text.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError("use_bidirectional_attention in config.json lets all tokens attend to later ones: not supported")
    heads = positive_int(text, "num_attention_heads")
    kv_heads = positive_int(text, "num_key_value_heads") if text.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    dim = positive_int(text, "head_dim") if text.get("head_dim") else positive_int(text, "hidden_size") // heads
    window = _window(text, layer)
    rotated, into = _is_rotated(text, stack, layer), text.get("attention_in_multiplier", 1.0)
    temperature = None
    if text.get("attn_temperature_tuning") and not rotated:
        temperature = float(text["attn_scale"]), positive_number(text, "floor_scale")
    qk_norm = stack.qk_norm or ("head" if text.get("use_qk_norm") else None)
    bias = bool(text.get("attention_bias", text.get("use_bias", False)))
    scale = text.get("attention_multiplier") or (text.get("query_pre_attn_scalar") or dim) ** -0.5
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=scale * text.get("key_multiplier", 1.0) * into**2,
        rope=rope_spec(text, stack, dim, "full_attention" if window is None else "sliding_attention") if rotated else None,
        bias=bias if stack.bias is None else stack.bias,
        out_bias=bool(text.get("attention_out_bias", bias)) if stack.out_bias is None else stack.out_bias,
        qk_norm=None if qk_norm == "plain" and not (rotated and text.get("use_qk_norm")) else qk_norm,
        window=window,
        soft_cap=text.get("attn_logit_softcapping"),
        fused=stack.fused_qkv,
        sinks=stack.sinks,
        gated=stack.gated,
        temperature=temperature,
        chunked=_layer_type(text, layer) == _CHUNKED,
        value_norm=stack.value_norm,
        keys_as_values=bool(text.get("attention_k_eq_v")) and window is None,
        source=_cache_source(text, layer),
        out_scale=into * text.get("attention_out_multiplier", 1.0),
        query_latent=_query_latent(text, dim),
    )


def _query_latent(text: Mapping[str, Any], dim: int) -> int | None:
    """Return the width of compressed queries, which null sets to that of a head; None for stacks without them."""
    if "share_q_dim" not in text:
        return None
    return positive_int({"share_q_dim": text["share_q_dim"] or dim}, "share_q_dim")


def _layer_keys(text: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Return the config with the values of one layer in place of the general ones (Gemma 4: wider heads without windows)."""
    if text.get("per_layer_config"):
        own = {int(number): keys for number, keys in text["per_layer_config"].items()}
        return {**text, **own.get(layer, {})}
    if not text.get("global_head_dim") or _window(text, layer) is not None:
        return text
    kv_heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return {**text, "head_dim": text["global_head_dim"], "num_key_value_heads": kv_heads or text["num_key_value_heads"]}


def _cache_source(text: Mapping[str, Any], layer: int) -> int | None:
    """Return the last layer of this layer's type with a KV cache of its own, if the layer has none."""
    first = positive_int(text, "num_hidden_layers") - (text.get("num_kv_shared_layers") or 0)
    if layer < first:
        return None
    window = _window(text, layer)
    return max(earlier for earlier in range(first) if _window(text, earlier) == window)


def _is_rotated(text: Mapping[str, Any], stack: Stack, layer: int) -> bool:
    """Return whether a layer has rotary positions: by a list, at an interval, or by its window."""
    rope = text.get("rope_parameters")
    if stack.state_norms is not None and isinstance(rope, Mapping) and rope.get("rope_theta", 0) is None:  # OLMo Hybrid
        return False
    if "position_embedding_type" in stack.defaults:  # Granite 4: "rope", "nope" or null
        return bool(text["position_embedding_type"] == "rope")
    listed = _listed_rope(text, layer)
    if listed is not None:
        return listed
    return not stack.windows_rotate or not text.get("sliding_window") or _window(text, layer) is not None


def _listed_rope(text: Mapping[str, Any], layer: int) -> bool | None:
    """Return whether a list or an interval gives a layer rotary positions; None if the config has neither."""
    if text.get("no_rope_layers"):  # 1: rotary, 0: no positions
        return bool(text["no_rope_layers"][layer])
    if text.get("no_rope_layer_interval"):
        return bool((layer + 1) % text["no_rope_layer_interval"])
    return None


def _latent(text: Mapping[str, Any], stack: Stack) -> LatentSpec:
    rope_dim, nope_dim = positive_int(text, "qk_rope_head_dim"), positive_int(text, "qk_nope_head_dim")
    parameters = {**(text.get("rope_parameters") or text.get("rope_scaling") or {}), "partial_rotary_factor": None}
    text = {**text, "rope_parameters": parameters, "partial_rotary_factor": None}
    rope = rope_spec(text, stack, rope_dim, "full_attention")
    weight = rope.scaling.get("mscale_all_dim")
    mscale = yarn_mscale(rope.scaling["factor"], weight) if weight else 1.0
    return LatentSpec(
        heads=positive_int(text, "num_attention_heads"),
        query_latent=text.get("q_lora_rank"),
        latent=positive_int(text, "kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=positive_int(text, "v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * mscale**2,
        rope=rope,
        bias=bool(text.get("attention_bias", False)),
    )


def _window(text: Mapping[str, Any], layer: int) -> int | None:
    """Return a layer's sliding window, None for full attention, by layer type, by pattern, or from a certain layer on.

    For attention within chunks, return the length of a chunk.
    """
    window, kind = text.get("sliding_window"), _layer_type(text, layer)
    if kind == _CHUNKED:
        return positive_int(text, "attention_chunk_size")
    if kind is not None:
        if kind not in ("full_attention", "attention", "sliding_attention"):
            known = "full_attention, attention, sliding_attention, chunked_attention, linear_attention, mamba and conv"
            raise ConfigError(f"layer type {kind!r} is not supported; known are {known}")
        slides = kind == "sliding_attention"
    elif not window or text.get("use_sliding_window") is False:
        slides = False
    elif text.get("sliding_window_pattern"):
        slides = bool((layer + 1) % text["sliding_window_pattern"])
    else:
        slides = layer >= text.get("max_window_layers", 0)
    return positive_int(text, "sliding_window") if slides else None


def rope_spec(text: Mapping[str, Any], stack: Stack, dim: int, kind: str) -> RopeSpec:
    """Return the rotary positions of layers of this layer type, for heads of `dim` numbers."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters in config.json is {rope!r}; it must be an object")
    theta = text.get("rope_theta", 10000.0)
    if kind in rope:  # one object per layer type
        rope = rope[kind]
    elif kind == "sliding_attention" and text.get("rope_local_base_freq"):
        rope, theta = {}, text["rope_local_base_freq"]
    elif kind == "sliding_attention" and not stack.scaled_windows:
        rope, theta = {}, rope.get("rope_theta") or theta
    if dim > _MAX_HEAD_DIM:
        raise ConfigError(f"heads of {dim} numbers are wider than the limit of {_MAX_HEAD_DIM}; download config.json again")
    part = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
    rotated = text.get("rotary_dim") or int(dim * (1.0 if rope.get("rope_type") == "proportional" else part))
    if not 0 < rotated <= dim:
        raise ConfigError(f"partial_rotary_factor rotates {rotated} numbers of {dim}; it must be above 0, at most 1")
    sections = tuple(rope.get("mrope_section") or text.get("mrope_section") or (rotated // 2,))
    if sum(sections) * 2 != rotated:
        raise ConfigError(f"mrope_section {list(sections)} adds up to {sum(sections)}; it must be {rotated // 2}, half a head")
    fits = len(sections) in _AXES and min(sections) >= 0
    lay_out = stack.axes or (interleaved_sections if rope.get("mrope_interleaved") else chunked_sections)
    axes = lay_out(sections) if fits else ()
    if len(axes) != rotated // 2:
        raise ConfigError(f"mrope_section {list(sections)} fits no head; give one number each for time, height and width")
    return RopeSpec(
        theta=positive_number({"rope_theta": rope.get("rope_theta") or theta}, "rope_theta"),
        dim=rotated,
        axes=axes,
        num_axes=len(sections),
        interleaved=stack.interleaved,
        scaling=_scaling(text, rope),
    )


def _scaling(text: Mapping[str, Any], rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the raw scaling parameters with `rope_type`, trained length and factor filled in; empty for the default type."""
    rope_type = scaling_type(rope)
    if rope_type == "default":
        return {}
    longest = text.get("max_position_embeddings", 0)
    trained = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings") or longest
    scaling = {**rope, "rope_type": rope_type, "original_max_position_embeddings": trained}
    return scaling if scaling.get("factor") is not None else {**scaling, "factor": longest / trained}


def _mlp(text: Mapping[str, Any], stack: Stack, layer: int) -> MlpSpec | MoeSpec:
    if text.get("num_experts") and _sparse(text, layer):
        return _moe(text, stack)
    act, bias = _act(text, stack), bool(text.get("mlp_bias", text.get("use_bias", False)))
    multipliers = tuple(text.get("mlp_multipliers") or (1.0, 1.0))
    return MlpSpec(_inner(text, layer), act, bias, stack.fused, stack.plain, _sparsity(text, layer), multipliers)


def _act(text: Mapping[str, Any], stack: Stack) -> str:
    act = text.get("hidden_activation") or text.get("hidden_act", "silu")
    return check_activation("the decoder's hidden_act", act, gated=stack.plain is None)


def _moe(text: Mapping[str, Any], stack: Stack) -> MoeSpec:
    inner = require({"moe_intermediate_size": text.get("intermediate_size"), **text}, "moe_intermediate_size")
    widths = tuple(inner) if isinstance(inner, list | tuple) else (inner,)
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * widths[0]
    spec = MoeSpec(
        **{
            "experts": positive_int(text, "num_experts"),
            "top_k": positive_int(text, "num_experts_per_tok"),
            "inner": widths,
            "act": _act(text, stack),
            "shared_inner": shared,
            "normalise": bool(text.get("norm_topk_prob", True)),
            "scale": text.get("routed_scaling_factor") or 1.0,
            "scoring": text.get("scoring_func") or "softmax",
            "groups": 1 if text.get("topk_method") == "greedy" else text.get("n_group") or 1,
            "top_groups": text.get("topk_group") or 1,
            "jitter": text.get("router_jitter_noise") or 0.0,
            "bias": bool(text.get("mlp_bias", text.get("use_bias", False))),
            "plain": stack.plain,
            "latent": text.get("moe_latent_size") or 0,
            **stack.router,
        }
    )
    if spec.top_k > spec.experts or spec.experts % spec.groups or spec.top_groups > spec.groups:
        experts, groups = f"{spec.top_k} of {spec.experts} experts", f"{spec.top_groups} of {spec.groups} groups"
        raise ConfigError(f"config.json routes a row to {experts} in {groups}, which is impossible; download it again")
    return spec


def _inner(text: Mapping[str, Any], layer: int) -> int:
    """Return the width of a plain MLP. LFM2 takes two thirds of its config's value, multiplied and rounded up."""
    if text.get("num_experts") == 0 and text.get("shared_expert_intermediate_size"):  # Granite 4 without experts
        return positive_int(text, "shared_expert_intermediate_size")
    if text.get("intermediate_size_mlp"):  # Llama 4, whose intermediate_size is that of an expert
        return positive_int(text, "intermediate_size_mlp")
    widths = text.get("intermediate_size")
    own = {"intermediate_size": widths[layer]} if isinstance(widths, list) else {}
    inner = positive_int({"intermediate_size": text.get("block_ff_dim"), **text, **own}, "intermediate_size")
    if text.get("use_double_wide_mlp") and _cache_source(text, layer) is not None:
        return 2 * inner
    if not text.get("block_auto_adjust_ff_dim"):
        return inner
    inner, unit = int(inner * 2 / 3), positive_int(text, "block_multiple_of")
    return -(-int((text.get("block_ffn_dim_multiplier") or 1.0) * inner) // unit) * unit


def _sparsity(text: Mapping[str, Any], layer: int) -> float:
    """Return the share of a layer's gate that is cut to zero. By default only the first layers of Gemma 3n cut any."""
    shares = text.get("activation_sparsity_pattern", 0.0)
    if shares is None:
        return 0.95 if layer < 10 < positive_int(text, "num_hidden_layers") else 0.0
    share = shares[layer] if isinstance(shares, list) else shares
    if not 0 <= share < 1:
        raise ConfigError(f"activation_sparsity_pattern in config.json has {share!r}; it must be at least 0 and below 1")
    return float(share)


def _sparse(text: Mapping[str, Any], layer: int) -> bool:
    """Return True if the layer's MLP is a mixture of experts. Each family of configs states this under keys of its own."""
    if "enable_moe_block" in text:  # experts are beside the MLP
        return False
    if _layer_type(text, layer) in ("mlp", "moe"):
        return _layer_type(text, layer) == "moe"
    if text.get("mlp_layer_types"):
        return bool(text["mlp_layer_types"][layer] == "sparse")
    if text.get("moe_layers") is not None:
        listed = text["moe_layers"]  # numbers, or a string of them (Step3)
        return layer in (map(int, listed.split(",")) if isinstance(listed, str) else listed)
    last = text.get("moe_layer_end_index", -1)
    first, last = text.get("moe_layer_start_index", 0), last if last >= 0 else positive_int(text, "num_hidden_layers") - 1
    if layer < text.get("first_k_dense_replace", 0) or layer in (text.get("mlp_only_layers") or ()):
        return False
    every = text.get("decoder_sparse_step") or text.get("moe_layer_interval") or 1
    return bool(first <= layer <= last and (layer + 1) % every == 0)


def pooling_mode(config: Mapping[str, Any], default: str) -> str:
    """Return `PoolingParams.pooling` for the mode of 1_Pooling/config.json; ConfigError for a mode that is not supported."""
    mode = config.get("pooling_mode", default)
    if mode not in _POOLINGS:
        raise ConfigError(f"pooling mode {mode!r} is not supported; known are {', '.join(_POOLINGS)}")
    return _POOLINGS[mode]


def positive_int(config: Mapping[str, Any], key: str, file: str = "config.json") -> int:
    """Return the positive integer under `key`; ConfigError names the key and the file otherwise."""
    value = require(config, key, file)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} in {file} is {repr(value)[:60]}; it must be a positive integer")
    return value


def positive_number(config: Mapping[str, Any], key: str) -> float:
    """Return the finite number above 0 under `key`; ConfigError names the key otherwise."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} in config.json is {value!r}; it must be a number above 0")
    return float(value)


def require(config: Mapping[str, Any], key: str, file: str = "config.json") -> Any:
    """Return the value under `key`; ConfigError names the key and the file if it is missing."""
    if config.get(key) is None:
        raise ConfigError(f"{file} lacks {key!r}; download it again")
    return config[key]
