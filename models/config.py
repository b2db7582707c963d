"""Reads and checks config.json, in flat (old) and nested (new) layouts, and builds a DecoderSpec from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..kernels.activation import REFERENCES, UNGATED
from ..mm.errors import ConfigError, SensoriumError, typed
from .text.rope import scaling_type, yarn_mscale
from .text.spec import (
    PLAIN_NORMS,
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    Norms,
    RopeSpec,
    chunked_sections,
    interleaved_sections,
)


@dataclass(frozen=True)
class Stack:
    """The features of a published stack that its config.json does not state.

    Args:
        defaults: values of keys that config.json may leave out.
        bias: the q, k, v projections have a bias. out_bias: the output projection has one. None: read from the config.
        qk_norm: as in AttentionSpec; None: read from the config. norms, parallel: as in LayerSpec.
        norm: as in DecoderSpec. eps_key: key of the norms' epsilon.
        interleaved: as in RopeSpec.
        axes: function from mrope_section to the axis of each frequency; None: chunked, unless the config says interleaved.
        fused: gate and up are stored as one matrix. fused_qkv: as `fused` of AttentionSpec. plain: as in MlpSpec.
        windows_rotate: if some layers have windows, only these have rotary positions.
        scaled_windows: the rope scaling is for layers with windows, too.
        norm_offset: as in DecoderSpec.
        root_scale: token embeddings are scaled by the root of the hidden size.
        router: fields of MoeSpec. sinks: as in AttentionSpec.
        refused: keys of config.json that must be false, because the feature is not implemented for this stack.
        fixed: keys of config.json that must have this value; the stack implements no other.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: str | None = None
    norms: Norms = PLAIN_NORMS
    parallel: bool = False
    norm: str = "rms"
    eps_key: str = "rms_norm_eps"
    interleaved: bool = False
    axes: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    fused: bool = False
    fused_qkv: bool = False
    plain: tuple[str, str] | None = None
    windows_rotate: bool = False
    scaled_windows: bool = True
    norm_offset: float = 0.0
    root_scale: bool = False
    router: Mapping[str, Any] = field(default_factory=dict)
    sinks: bool = False
    refused: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)


ALIASES = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "shared_intermediate_size": "shared_expert_intermediate_size",
    "moe_num_shared_experts": "n_shared_experts",
    "qkv_bias": "attention_bias",
    "use_qkv_bias": "attention_bias",
}
"""Other names of a key -> the name that is read here."""

SECTIONS = frozenset(
    f"{part}_config"
    for part in (
        "audio", "encoder", "language", "llm", "perceiver", "projector", "qformer", "text", "thinker", "vision",
    )
)  # fmt: skip
"""Keys of config.json that are read as sections. Other keys with such an ending may hold anything."""

PER_MODALITY = ("num_experts", "num_experts_per_tok", "moe_layer_start_index", "moe_layer_end_index")
"""Keys that configs may repeat for each modality, or for each layer with equal values; the first value counts."""
_ACTIVATION_NAMES = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
"""Other names of activation functions."""

_COUNT_KEYS, _MAX_COUNT = ("layers", "depth", "experts"), 4096  # a larger count would build modules forever
_MAX_HEAD_DIM = 1 << 14
_AXES = (1, 3, 4)  # numbers of position axes: one; time, height, width; or a text axis and these three


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a config.json: the first nested section of three names, or all of it (or of its thinker)."""
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, Mapping) else config
    nested = (config.get(key) for key in ("text_config", "language_config", "llm_config"))
    return next((part for part in nested if isinstance(part, Mapping)), config)


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


def decoder_spec(config: Mapping[str, Any], stack: Stack | None = None, **changes: Any) -> DecoderSpec:
    """Read the decoder from a whole config.json; `changes` override fields of DecoderSpec.

    Raises:
        ConfigError: a key is missing, unreadable or asks for an unsupported feature; the message names it.
    """
    stack = stack or Stack()
    text = {**stack.defaults, **{ALIASES.get(key, key): value for key, value in get_text_config(config).items()}}
    text |= {key: text[key][0] for key in PER_MODALITY if isinstance(text.get(key), list)}
    try:
        return replace(_read(config, text, stack), **changes)
    except SensoriumError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"the decoder's part of config.json cannot be read ({error})") from None


def _read(config: Mapping[str, Any], text: Mapping[str, Any], stack: Stack) -> DecoderSpec:
    hidden = positive_int(text, "hidden_size")
    layers = tuple(
        LayerSpec(_attention(text, stack, i), _mlp(text, stack, i), stack.norms, stack.parallel)
        for i in range(positive_int(text, "num_hidden_layers"))
    )
    ropes = [layer.attention.rope for layer in layers if layer.attention.rope is not None]
    limits = [rope.scaling["original_max_position_embeddings"] for rope in ropes if "short_factor" in rope.scaling]
    longest = positive_int({"max_position_embeddings": 32768, **text}, "max_position_embeddings")
    return DecoderSpec(
        vocab_size=positive_int(text, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        eps=_positive({stack.eps_key: 1e-6, **text}, stack.eps_key),
        max_positions=min([longest, *limits]),
        tied=_tied(config, stack),
        norm=stack.norm,
        norm_offset=stack.norm_offset,
        embed_scale=hidden**0.5 if stack.root_scale else text.get("embedding_multiplier", 1.0),
        residual_scale=text.get("residual_multiplier", 1.0),
        logit_scale=text.get("logit_scale") or 1.0 / text.get("logits_scaling", 1.0),
        logit_cap=text.get("final_logit_softcapping"),
        head_bias=bool(text.get("lm_head_bias", False)),
        mtp_layers=positive_int(text, _MTP_LAYERS) if text.get(_MTP_LAYERS) else 0,
    )


def _tied(config: Mapping[str, Any], stack: Stack) -> bool:
    """Return True if the config or its text part ties the head; if neither says, the stack's default."""
    values = [part.get("tie_word_embeddings") for part in (config, get_text_config(config))]
    return any(values) if any(value is not None for value in values) else bool(stack.defaults.get("tie_word_embeddings"))


def _attention(text: Mapping[str, Any], stack: Stack, layer: int) -> AttentionSpec | LatentSpec:
    if text.get("kv_lora_rank"):
        return _latent(text, stack)
    heads = positive_int(text, "num_attention_heads")
    kv_heads = positive_int(text, "num_key_value_heads") if text.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    dim = positive_int(text, "head_dim") if text.get("head_dim") else positive_int(text, "hidden_size") // heads
    window = _window(text, layer)
    rotated = _is_rotated(text, stack, layer)
    bias = bool(text.get("attention_bias", text.get("use_bias", False)))
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=text.get("attention_multiplier") or (text.get("query_pre_attn_scalar") or dim) ** -0.5,
        rope=_rope(text, stack, dim, "full_attention" if window is None else "sliding_attention") if rotated else None,
        bias=bias if stack.bias is None else stack.bias,
        out_bias=bool(text.get("attention_out_bias", bias)) if stack.out_bias is None else stack.out_bias,
        qk_norm=stack.qk_norm or ("head" if text.get("use_qk_norm") else None),
        window=window,
        soft_cap=text.get("attn_logit_softcapping"),
        fused=stack.fused_qkv,
        sinks=stack.sinks,
    )


def _is_rotated(text: Mapping[str, Any], stack: Stack, layer: int) -> bool:
    """Return whether a layer has rotary positions: by a list, at an interval, or by its window."""
    if text.get("no_rope_layers"):  # 1: rotary, 0: no positions
        return bool(text["no_rope_layers"][layer])
    if text.get("no_rope_layer_interval"):
        return bool((layer + 1) % text["no_rope_layer_interval"])
    return not stack.windows_rotate or not text.get("sliding_window") or _window(text, layer) is not None


def _latent(text: Mapping[str, Any], stack: Stack) -> LatentSpec:
    rope_dim, nope_dim = positive_int(text, "qk_rope_head_dim"), positive_int(text, "qk_nope_head_dim")
    parameters = {**(text.get("rope_parameters") or text.get("rope_scaling") or {}), "partial_rotary_factor": None}
    text = {**text, "rope_parameters": parameters, "partial_rotary_factor": None}
    rope = _rope(text, stack, rope_dim, "full_attention")
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
    """Return a layer's sliding window, None for full attention, by layer type, by pattern, or from a certain layer on."""
    window, layer_types = text.get("sliding_window"), text.get("layer_types")
    if layer_types:
        kind = layer_types[layer]
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer type {kind!r} is not supported; known are full_attention and sliding_attention")
        slides = kind == "sliding_attention"
    elif not window or text.get("use_sliding_window") is False:
        slides = False
    elif text.get("sliding_window_pattern"):
        slides = bool((layer + 1) % text["sliding_window_pattern"])
    else:
        slides = layer >= text.get("max_window_layers", 0)
    return positive_int(text, "sliding_window") if slides else None


def _rope(text: Mapping[str, Any], stack: Stack, dim: int, kind: str) -> RopeSpec:
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
    rotated = text.get("rotary_dim") or int(
        dim * (rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0)
    )
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
        theta=_positive({"rope_theta": rope.get("rope_theta") or theta}, "rope_theta"),
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
    act = text.get("hidden_activation") or text.get("hidden_act", "silu")
    act = check_activation("the decoder's hidden_act", act, gated=stack.plain is None)
    bias = bool(text.get("mlp_bias", text.get("use_bias", False)))
    if not text.get("num_experts") or not _sparse(text, layer):
        return MlpSpec(positive_int(text, "intermediate_size"), act, bias, stack.fused, stack.plain)
    inner = require({"moe_intermediate_size": text.get("intermediate_size"), **text}, "moe_intermediate_size")
    widths = tuple(inner) if isinstance(inner, list | tuple) else (inner,)
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * widths[0]
    spec = MoeSpec(
        **{
            "experts": positive_int(text, "num_experts"),
            "top_k": positive_int(text, "num_experts_per_tok"),
            "inner": widths,
            "act": act,
            "shared_inner": shared,
            "normalise": bool(text.get("norm_topk_prob", True)),
            "scale": text.get("routed_scaling_factor") or 1.0,
            "scoring": text.get("scoring_func") or "softmax",
            "groups": 1 if text.get("topk_method") == "greedy" else text.get("n_group") or 1,
            "top_groups": text.get("topk_group") or 1,
            "jitter": text.get("router_jitter_noise") or 0.0,
            "bias": bias,
            **stack.router,
        }
    )
    if spec.top_k > spec.experts or spec.experts % spec.groups or spec.top_groups > spec.groups:
        experts, groups = f"{spec.top_k} of {spec.experts} experts", f"{spec.top_groups} of {spec.groups} groups"
        raise ConfigError(f"config.json routes a row to {experts} in {groups}, which is impossible; download it again")
    return spec


def _sparse(text: Mapping[str, Any], layer: int) -> bool:
    """Return True if the layer's MLP is a mixture of experts. Each family of configs states this under keys of its own."""
    if text.get("mlp_layer_types"):
        return bool(text["mlp_layer_types"][layer] == "sparse")
    last = text.get("moe_layer_end_index", -1)
    first, last = text.get("moe_layer_start_index", 0), last if last >= 0 else positive_int(text, "num_hidden_layers") - 1
    if layer < text.get("first_k_dense_replace", 0) or layer in (text.get("mlp_only_layers") or ()):
        return False
    every = text.get("decoder_sparse_step") or text.get("moe_layer_interval") or 1
    return bool(first <= layer <= last and (layer + 1) % every == 0)


def positive_int(config: Mapping[str, Any], key: str, file: str = "config.json") -> int:
    """Return the positive integer under `key`; ConfigError names the key and the file otherwise."""
    value = require(config, key, file)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} in {file} is {repr(value)[:60]}; it must be a positive integer")
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
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
