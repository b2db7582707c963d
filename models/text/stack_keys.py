"""Values of keys of config.json that follow from other keys, for stacks that state them in a way of their own.

Source: the configuration and modelling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checkpoints.config import positive_int


def falcon_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Falcon's `new_decoder_architecture`, `multi_query` and `parallel_attn` say about heads and norms.

    The new architecture is always parallel, with two norms unless it asks for one.
    """
    is_new = bool(text.get("new_decoder_architecture"))
    heads = positive_int(text, "num_attention_heads")
    kv_heads = text.get("num_kv_heads") or heads
    return {
        "num_key_value_heads": kv_heads if is_new else 1 if text["multi_query"] else heads,
        "intermediate_size": text.get("ffn_hidden_size") or 4 * positive_int(text, "hidden_size"),
        "use_parallel_residual": is_new or bool(text["parallel_attn"]),
        "parallel_norms": 2 if is_new and text.get("num_ln_in_parallel_attn") in (None, 2) else 1,
    }


def mamba_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inner width of Mamba's projection of steps, which "auto" sets to a sixteenth of the hidden size."""
    rank = text["mamba_dt_rank"]
    return {"mamba_dt_rank": -(-positive_int(text, "hidden_size") // 16) if rank == "auto" else rank}


def kimi_linear_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Kimi Linear's `linear_attn_config` says about layers, which it counts from 1, and about their heads."""
    linear = text.get("linear_attn_config") or {}
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
    keys: dict[str, Any] = {key: linear.get(name, text[key]) for name, key in names.items()}
    count, listed = positive_int(text, "num_hidden_layers"), linear.get("full_attn_layers")
    if not text.get("layer_types"):
        full = range(4, count, 4) if listed is None else [number - 1 for number in listed]
        keys["layer_types"] = ["full_attention" if layer in full else "linear_attention" for layer in range(count)]
    return keys
