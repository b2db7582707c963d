"""Reads the attention of each layer from config.json: heads, windows, rotary positions and latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, positive_number
from .rope import scaling_type, yarn_mscale
from .spec import AttentionSpec, IndexerSpec, LatentSpec, RopeSpec, chunked_sections, interleaved_sections
from .stack import Stack

_MAX_HEAD_DIM = 1 << 14

_CHUNKED = "chunked_attention"
_ANSWER_WINDOW = "reference_sliding_attention"

_AXES = (1, 3, 4)  # numbers of position axes: one; time, height, width; or a text axis and these three

_PATTERN = {
    "M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "hybrid": "attention", "0": "linear_attention", "1": "attention",
}  # fmt: skip
"""Other layer types -> those read here: letters (Nemotron-H), both mixers in each layer (Falcon-H1), numbers (MiniMax)."""


def layer_type(text: Mapping[str, Any], layer: int) -> str | None:
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


def attention_spec(text: Mapping[str, Any], stack: Stack, layer: int) -> AttentionSpec:
    text = _layer_keys(text, layer)
    if text.get("is_causal") is False:
        raise ConfigError("is_causal in config.json is false, which is supported in text-only models alone; set it to true")
    if text.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError(
            "use_bidirectional_attention in config.json is read by text models of Gemma 3 and Gemma 4 only; what it does in "
            "others depends on the library's implementation of attention"
        )
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
    qk_norm = stack.qk_norm or (("head" if stack.norm == "rms" else "centered") if text.get("use_qk_norm") else None)
    bias = bool(text.get("attention_bias", text.get("use_bias", False)))
    folds = not bias  # into the factor of the scores and of the output
    scale = text.get("attention_multiplier") or (text.get("query_pre_attn_scalar") or dim) ** -0.5
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=scale * text.get("key_multiplier", 1.0) * (into**2 if folds else 1.0),
        rope=rope_spec(text, stack, dim, "full_attention" if window is None else "sliding_attention") if rotated else None,
        bias=bias if stack.bias is None else stack.bias,
        out_bias=bool(text.get("attention_out_bias", text.get("use_bias", bias))) if stack.out_bias is None else stack.out_bias,
        qk_norm=None if qk_norm == "plain" and not (rotated and text.get("use_qk_norm")) else qk_norm,
        window=window,
        soft_cap=text.get("attn_logit_softcapping"),
        fused=stack.fused_qkv,
        grouped=stack.grouped_qkv,
        sinks=stack.sinks,
        gated=stack.gated,
        head_gate=stack.head_gate,
        temperature=temperature,
        chunked=layer_type(text, layer) == _CHUNKED,
        value_norm=stack.value_norm,
        keys_as_values=bool(text.get("attention_k_eq_v")) and window is None,
        source=cache_source(text, layer),
        in_scale=1.0 if folds else into,
        out_scale=(into if folds else 1.0) * text.get("attention_out_multiplier", 1.0),
        query_latent=_query_latent(text, dim),
        clip=positive_number(text, "clip_qkv") if text.get("clip_qkv") else None,
        answer_window=positive_int(text, "sliding_window") if layer_type(text, layer) == _ANSWER_WINDOW else None,
    )


def _query_latent(text: Mapping[str, Any], dim: int) -> int | None:
    """Return the width of compressed queries, which null sets to that of a head; None for stacks without them."""
    if "share_q_dim" not in text:
        return None
    return positive_int({"share_q_dim": text["share_q_dim"] or dim}, "share_q_dim")


def _layer_keys(text: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Return the config with the values of one layer in place of the general ones (Gemma 4: wider heads without windows)."""
    text = {**text, **_listed_keys(text, layer)}
    if text.get("per_layer_config") is not None:
        of_layers = {int(number): keys for number, keys in text["per_layer_config"].items()}
        return {**text, **of_layers.get(layer, {})}
    if not text.get("global_head_dim") or _window(text, layer) is not None:
        return text
    kv_heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return {**text, "head_dim": text["global_head_dim"], "num_key_value_heads": kv_heads or text["num_key_value_heads"]}


def _listed_keys(text: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the values of one layer that Step 3.5 gives per layer (in lists) or for some layer types only."""
    values: dict[str, Any] = {}
    for listed, key in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        if isinstance(text.get(listed), list):
            values[key] = text[listed][layer]
    kind, other = layer_type(text, layer), text.get("attention_other_setting") or {}
    if kind is not None and kind == other.get("attention_type"):
        for name, key in (("num_attention_groups", "num_key_value_heads"), ("num_attention_heads",) * 2, ("head_dim",) * 2):
            if other.get(name):
                values[key] = other[name]
    if text.get("yarn_only_types") and kind not in text["yarn_only_types"]:
        values["rope_scaling"] = None
    return values


def cache_source(text: Mapping[str, Any], layer: int) -> int | None:
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


def latent_spec(text: Mapping[str, Any], stack: Stack, layer: int) -> LatentSpec:
    shared_dim, nope_dim = positive_int(text, "qk_rope_head_dim"), positive_int(text, "qk_nope_head_dim")
    parameters = {**(text.get("rope_parameters") or text.get("rope_scaling") or {}), "partial_rotary_factor": None}
    text = {**text, "rope_parameters": parameters, "partial_rotary_factor": None}
    rope = rope_spec(text, stack, shared_dim, "full_attention") if _is_rotated(text, stack, layer) else None
    weight = rope.scaling.get("mscale_all_dim") if rope is not None else None
    mscale = yarn_mscale(rope.scaling["factor"], weight) if rope is not None and weight else 1.0
    return LatentSpec(
        heads=positive_int(text, "num_attention_heads"),
        query_latent=text.get("q_lora_rank"),
        latent=positive_int(text, "kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=positive_int(text, "v_head_dim"),
        scale=(nope_dim + shared_dim) ** -0.5 * mscale**2,
        rope=rope,
        bias=bool(text.get("attention_bias", False)),
        unrotated_dim=0 if rope is not None else shared_dim,
        indexer=_indexer_spec(text, stack, layer) if text.get("index_topk") else None,
    )


def _indexer_spec(text: Mapping[str, Any], stack: Stack, layer: int) -> IndexerSpec:
    """Read which keys a layer attends to. ConfigError if the first layer has no indexer, or queries are not compressed."""
    if not text.get("q_lora_rank"):
        raise ConfigError("index_topk in config.json needs q_lora_rank; set it, or index_topk to null")
    if not _is_rotated(text, stack, layer):
        raise ConfigError("index_topk in config.json needs rotary positions; set it to null")
    shared = _shares_keys(text, layer)
    if shared and not layer:
        raise ConfigError("indexer_types in config.json must begin with a layer that selects keys (full)")
    heads, dim, top_k = (positive_int(text, key) for key in ("index_n_heads", "index_head_dim", "index_topk"))
    if dim < text["qk_rope_head_dim"]:
        raise ConfigError(f"index_head_dim {dim} in config.json is below qk_rope_head_dim {text['qk_rope_head_dim']}")
    return IndexerSpec(heads, dim, top_k, stack.index_interleaved, shared)


def _shares_keys(text: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer takes the keys of an earlier one: by a list, by a pattern of letters, or at an interval."""
    kinds = text.get("indexer_types") or text.get("index_topk_pattern")
    if kinds:
        return str(kinds[layer]) in ("shared", "S")
    interval, first = max(text.get("index_topk_freq") or 1, 1), text.get("index_skip_topk_offset", 2)
    return bool(max(layer - first + 1, 0) % interval)


def _window(text: Mapping[str, Any], layer: int) -> int | None:
    """Return a layer's sliding window, None for full attention, by layer type, by pattern, or from a certain layer on.

    For attention within chunks, return the length of a chunk.
    """
    window, kind = text.get("sliding_window"), layer_type(text, layer)
    if kind == _CHUNKED:
        return positive_int(text, "attention_chunk_size")
    if kind is not None:
        if kind not in ("full_attention", "attention", "sliding_attention", _ANSWER_WINDOW):
            choice = "full_attention, attention, sliding_attention, chunked_attention, linear_attention, mamba and conv"
            raise ConfigError(f"layer type {kind!r} is not supported; known are {choice}")
        slides = kind == "sliding_attention"
    elif not window or text.get("use_sliding_window") is False:
        slides = False
    elif text.get("sliding_window_pattern"):
        slides = bool((layer + 1) % text["sliding_window_pattern"]) and layer < text.get("max_window_layers", layer + 1)
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
    odd, scaling = bool(rotated % 2), rope_scaling(text, rope)
    if odd and scaling.get("rope_type") in ("yarn", "ntk", "factors"):
        raise ConfigError(
            f"partial_rotary_factor rotates {rotated} numbers, which is odd; {scaling['rope_type']} is defined for pairs only"
        )
    rotated += odd  # a pair is rotated whole
    if not 0 < rotated <= dim:
        raise ConfigError(f"partial_rotary_factor rotates {rotated} numbers of {dim}; it must be above 0, at most 1")
    sections = tuple(rope.get("mrope_section") or text.get("mrope_section") or (rotated // 2,))
    fits = len(sections) in _AXES and min(sections) >= 0
    if stack.axes is interleaved_sections and fits:  # all frequencies that are not of height and width are of time
        sections = (rotated // 2 - sum(sections[1:]), *sections[1:])
    if sum(sections) * 2 != rotated:
        raise ConfigError(f"mrope_section {list(sections)} adds up to {sum(sections)}; it must be {rotated // 2}, half a head")
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
        scaling=scaling,
        odd=odd,
    )


def rope_scaling(text: Mapping[str, Any], rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the raw scaling parameters with `rope_type`, trained length and factor filled in; empty for the default type."""
    rope_type = scaling_type(rope)
    if rope_type == "default":
        return {}
    longest = text.get("max_position_embeddings", 0)
    trained = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings") or longest
    scaling = {**rope, "rope_type": rope_type, "original_max_position_embeddings": trained}
    return scaling if scaling.get("factor") is not None else {**scaling, "factor": longest / trained}


def fixed_rope(config: Mapping[str, Any], section: str, dim: int) -> RopeSpec:
    """Return the rotary positions of a section of config.json that has one axis; ConfigError for types that read the length."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        reason = "with which the positions of a part would depend on the parts after it"
        raise ConfigError(f"rope type {rope['rope_type']!r} of {section} in config.json is not supported, {reason}")
    theta = positive_number({"rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10000.0}, "rope_theta")
    return RopeSpec(theta, dim, (0,) * (dim // 2), scaling=rope_scaling(config, rope))
