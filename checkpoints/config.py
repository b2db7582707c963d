"""Reads config.json: its sections, and checked values of its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..callers.errors import ConfigError, typed
from ..kernels.activation.reference import IN_TORCH, REFERENCES

SECTIONS = frozenset(
    f"{part}_config"
    for part in (
        "audio", "audio_encoder", "encoder", "language", "llm", "perceiver", "projector", "qformer", "text", "thinker",
        "vision",
    )
)  # fmt: skip
"""Keys of config.json that are read as sections. Other keys with such an ending may hold anything."""

_ACTIVATION_NAMES = {
    "gelu_python": "gelu",
    "swish": "silu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_pytorch_tanh"),
}
"""Other names of activation functions."""
_LEARNED = ("prelu", "xielu")

_CHANNEL_KEYS = ("num_channels", "in_channels", "in_chans")
_COUNT_KEYS, _MAX_COUNT = ("layers", "depth", "experts"), 4096  # a larger count would build modules forever

_POOLINGS = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
}
"""sentence-transformers' name of a pooling -> ours."""


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


def check_activation(key: str, act: str) -> str:
    """Return our name of the activation `act`, the config's value under `key`; ConfigError if it is not supported."""
    supported, act = REFERENCES | IN_TORCH, _ACTIVATION_NAMES.get(act, act)
    if act in _LEARNED:
        raise ConfigError(f"{key} {act!r} has parameters of its own, which are not read; known are {', '.join(supported)}")
    if act not in supported:
        raise ConfigError(f"{key} {act!r} is not supported; known are {', '.join(supported)}")
    return act


def check_parts(config: Mapping[str, Any]) -> None:
    """Check what every family needs.

    Raises:
        ConfigError: a section of config.json is not an object, there are absurdly many layers or experts, or the encoder takes
            images with other channels than red, green and blue.
    """
    for key, value in config.items():
        if key == "vision_config" and isinstance(value, Mapping):
            _check_channels(value)
        if key in SECTIONS and not isinstance(value, Mapping | None):
            raise ConfigError(f"{key} in config.json is {typed(value)}; it must be an object")
        if isinstance(value, Mapping):
            check_parts(value)
        elif any(word in key for word in _COUNT_KEYS):
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number > _MAX_COUNT:
                    raise ConfigError(f"{key} in config.json is {number:.3g}, the limit is {_MAX_COUNT}; download it again")


def _check_channels(vision: Mapping[str, Any]) -> None:
    for key in _CHANNEL_KEYS:
        if vision.get(key) not in (None, 3):
            raise ConfigError(
                f"{key} in vision_config is {vision[key]!r}, but images have 3 channels; download config.json again"
            )


def pooling_mode(config: Mapping[str, Any], default: str) -> str:
    """Return `PoolingParams.pooling` for the mode of 1_Pooling/config.json, or for several joined by "+".

    ConfigError for a mode that is not supported.
    """
    modes = str(config.get("pooling_mode", default)).split("+")
    for mode in modes:
        if mode not in _POOLINGS:
            raise ConfigError(f"pooling mode {mode!r} is not supported; known are {', '.join(_POOLINGS)}")
    return "+".join(_POOLINGS[mode] for mode in modes)


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
