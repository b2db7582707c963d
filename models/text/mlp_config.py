"""Reads the MLP or the mixture of experts of each layer from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...callers.errors import ConfigError
from ...checkpoints.config import check_activation, positive_int, positive_number, require
from ...kernels.activation.reference import CLAMPED_SWIGLU, clamped_swiglu, limited_silu
from .attention_config import cache_source, layer_type
from .spec import MlpSpec, MoeSpec
from .stack import Stack

_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def mlp_spec(text: Mapping[str, Any], stack: Stack, layer: int) -> MlpSpec | MoeSpec:
    if text.get("num_experts") and _sparse(text, layer):
        return replace(moe_spec(text, stack), **_limited_acts(text, layer))
    act, bias = (
        _limited_acts(text, layer).get("shared_act", _act(text, stack)),
        bool(text.get("mlp_bias", text.get("use_bias", False))),
    )
    multipliers = tuple(text.get("mlp_multipliers") or (1.0, 1.0))
    return MlpSpec(_inner(text, layer), act, bias, stack.fused, stack.plain, _sparsity(text, layer), multipliers)


def _act(text: Mapping[str, Any], stack: Stack) -> str:
    act = text.get("hidden_activation") or text.get("hidden_act", "silu")
    return check_activation("the decoder's hidden_act", act)


def moe_spec(text: Mapping[str, Any], stack: Stack) -> MoeSpec:
    inner = require({"moe_intermediate_size": text.get("intermediate_size"), **text}, "moe_intermediate_size")
    widths = tuple(inner) if isinstance(inner, list | tuple) else (inner,)
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * widths[0]
    act, bias = _act(text, stack), bool(text.get("mlp_bias", text.get("use_bias", False)))
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
            "shared_act": act,
            "shared_bias": bias,
            "plain": stack.plain,
            "latent": text.get("moe_latent_size") or 0,
            **stack.router,
            **_clamped(text, stack),
            **({"correction": False} if text.get("use_expert_bias") is False else {}),
        }
    )
    uneven = spec.group_score == "each" and spec.top_k % spec.groups
    if uneven or spec.top_k > spec.experts or spec.experts % spec.groups or spec.top_groups > spec.groups:
        experts, groups = f"{spec.top_k} of {spec.experts} experts", f"{spec.top_groups} of {spec.groups} groups"
        raise ConfigError(f"config.json routes a row to {experts} in {groups}, which is impossible; download it again")
    return spec


def _clamped(text: Mapping[str, Any], stack: Stack) -> dict[str, str]:
    """Return the activation of gpt-oss's experts with the numbers of its config."""
    if stack.router.get("act") != CLAMPED_SWIGLU:
        return {}
    alpha, limit = (positive_number({key: text.get(key, value)}, key) for key, value in _SWIGLU.items())
    return {"act": clamped_swiglu(alpha, limit)}


def _limited_acts(text: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the activations that Step 3.5 limits in a layer: `act` of the experts, and `shared_act` of the shared or only MLP.

    A limit of 0 or None is none.
    """
    lists = {"act": text.get("swiglu_limits"), "shared_act": text.get("swiglu_limits_shared")}
    limits = {name: listed[layer] for name, listed in lists.items() if listed and listed[layer]}
    return {name: limited_silu(positive_number({"swiglu_limits": limit}, "swiglu_limits")) for name, limit in limits.items()}


def _inner(text: Mapping[str, Any], layer: int) -> int:
    """Return the width of a plain MLP. LFM2 takes two thirds of its config's value, multiplied and rounded up."""
    if text.get("num_experts") == 0 and text.get("shared_expert_intermediate_size"):  # Granite 4 without experts
        return positive_int(text, "shared_expert_intermediate_size")
    if text.get("intermediate_size_mlp"):  # Llama 4, whose intermediate_size is that of an expert
        return positive_int(text, "intermediate_size_mlp")
    widths = text.get("intermediate_size")
    of_layer = {"intermediate_size": widths[layer]} if isinstance(widths, list) else {}
    inner = positive_int({"intermediate_size": text.get("block_ff_dim"), **text, **of_layer}, "intermediate_size")
    if text.get("use_double_wide_mlp") and cache_source(text, layer) is not None:
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
    if layer_type(text, layer) in ("mlp", "moe"):
        return layer_type(text, layer) == "moe"
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
