"""Published image encoders by model_type: defaults and features that the vision configs of many families leave out.

Source: the configuration and modelling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int
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
"""Defaults of keys that a vision config may leave out."""

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {"class_token": True, "patch_bias": False, "pre_norm": True},
    "siglip_vision_model": {},
}
"""Fields of TowerSpec. Pooling heads are not built; the last norm is built only if a family asks for it."""


def encoder_spec(vision: Mapping[str, Any], default: str, **changes: Any) -> TowerSpec:
    """Read a tower from a vision config. `default`: the model_type if the config has none; `changes` override fields.

    Raises:
        ConfigError: the encoder is not in the tables, or a size is not a positive integer.
    """
    c = with_defaults(vision, default)
    width, heads = positive_int(c, "hidden_size"), positive_int(c, "num_attention_heads")
    patch, size = positive_int(c, "patch_size"), positive_int(c, "image_size")
    spec: dict[str, Any] = {
        "depth": positive_int(c, "num_hidden_layers"),
        "width": width,
        "heads": heads,
        "inner": positive_int(c, "intermediate_size"),
        "patch_dim": positive_int(c, "num_channels") * patch**2,
        "act": c["hidden_act"],
        "eps": c["layer_norm_eps"],
        "table": TableSpec(size // patch),
        "names": ENCODER,
    }
    return TowerSpec(**{**spec, **FEATURES[c["model_type"]], **changes})


def with_defaults(vision: Mapping[str, Any], default: str) -> dict[str, Any]:
    """Return a vision config with all defaults filled in; ConfigError for an encoder that is not in the tables."""
    model_type = vision.get("model_type", default)
    if model_type not in DEFAULTS:
        raise ConfigError(f"vision_config of model_type {model_type!r} is not supported; known are {', '.join(DEFAULTS)}")
    return {**DEFAULTS[model_type], **vision, "model_type": model_type}
