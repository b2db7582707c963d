"""The parts of config.json that models read, checked once. Flat (old) and nested (new) layouts alike. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..mm.errors import ConfigError


@dataclass(frozen=True)
class TextConfig:
    """A decoder-only stack with grouped-query attention and SwiGLU. `rope_sections`: frequencies of each axis."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_sections: tuple[int, ...]
    max_positions: int
    tied: bool


def text_config(config: Mapping[str, Any], axes: int = 3) -> TextConfig:
    """From the whole config.json: `text_config` when it is there, else the top level.

    `axes`: of rotary positions, 3 for grids (in sections of 16, 24 and 24 where none are given) or 1.

    Raises:
        ConfigError: a missing key, or a feature this stack does not have, by its key.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters in config.json is {rope!r}; it must be an object")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ConfigError(f"rope type {kind!r} is not supported; known are default and mrope")
    if _slides(text):
        raise ConfigError("use_sliding_window with layers that slide is not supported by this architecture")
    if text.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {text['hidden_act']!r} is not supported in the decoder; known is silu")
    hidden, heads = count(text, "hidden_size"), count(text, "num_attention_heads")
    head_dim = text.get("head_dim") or hidden // heads
    sections = (head_dim // 2,) if axes == 1 else tuple(rope.get("mrope_section") or (16, 24, 24))
    if sum(sections) * 2 != head_dim:
        raise ConfigError(f"mrope_section {list(sections)} adds up to {sum(sections)}, half a head is {head_dim // 2}")
    kv_heads = text.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    return TextConfig(
        vocab_size=count(text, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=count(text, "intermediate_size"),
        layers=count(text, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=text.get("rms_norm_eps", 1e-5),
        rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 1e6),
        rope_sections=sections,
        max_positions=count({"max_position_embeddings": 32768} | dict(text), "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
    )


def _slides(text: Mapping[str, Any]) -> bool:
    """Whether a layer attends to a window only: listed by kind, or all from `max_window_layers` on."""
    if text.get("layer_types"):
        return "sliding_attention" in text["layer_types"]
    return bool(text.get("use_sliding_window")) and text.get("max_window_layers", 80) < count(text, "num_hidden_layers")


def count(config: Mapping[str, Any], key: str) -> int:
    """A positive integer; ConfigError names the key otherwise."""
    value = need(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} in config.json is {value!r}; it must be a positive integer")
    return value


def need(config: Mapping[str, Any], key: str) -> Any:
    """ConfigError names the missing key."""
    if config.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}; it is not complete")
    return config[key]
