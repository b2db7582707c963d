"""The published image encoders that many families build on, by the model_type of a vision config: data. Knows no family.

Source: the configuration and modelling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...mm.errors import ConfigError
from ..config import count
from .spec import ENCODER, TableSpec, TowerSpec

_BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": _BASE | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": _BASE | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
"""What a vision config may leave out."""

PARTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {"class_token": True, "patch_bias": False, "pre_norm": True},
    "siglip_vision_model": {},
}
"""What a vision config does not say. Pooling heads are not built, and last norms only where a family asks for them."""


def encoder_spec(vision: Mapping[str, Any], default: str, **changes: Any) -> TowerSpec:
    """Of a vision config of model_type `default` where it does not tell; `changes` are what the family knows better.

    Raises:
        ConfigError: an encoder that is not in the tables, a size that is no number.
    """
    c = completed(vision, default)
    width, heads, patch, size = (count(c, key) for key in ("hidden_size", "num_attention_heads", "patch_size", "image_size"))
    spec: dict[str, Any] = {
        "depth": count(c, "num_hidden_layers"),
        "width": width,
        "heads": heads,
        "inner": count(c, "intermediate_size"),
        "patch_dim": count(c, "num_channels") * patch**2,
        "act": c["hidden_act"],
        "eps": c["layer_norm_eps"],
        "table": TableSpec(size // patch),
        "names": ENCODER,
    }
    return TowerSpec(**{**spec, **PARTS[c["model_type"]], **changes})


def completed(vision: Mapping[str, Any], default: str) -> dict[str, Any]:
    """A vision config with all that it leaves out; ConfigError for an encoder that is not in the tables."""
    kind = vision.get("model_type", default)
    if kind not in DEFAULTS:
        raise ConfigError(f"vision_config of model_type {kind!r} is not supported; known are {', '.join(DEFAULTS)}")
    return {**DEFAULTS[kind], **vision, "model_type": kind}
