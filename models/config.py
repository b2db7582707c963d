"""Reads config.json: its sections, and checked values of its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..kernels.activation import REFERENCES, UNGATED
from ..mm.errors import ConfigError, typed

SECTIONS = frozenset(
    f"{part}_config"
    for part in (
        "audio", "audio_encoder", "encoder", "language", "llm", "perceiver", "projector", "qformer", "text", "thinker",
        "vision",
    )
)  # fmt: skip
"""Keys of config.json that are read as sections. Other keys with such an ending may hold anything."""

_ACTIVATION_NAMES = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
"""Other names of activation functions."""

_COUNT_KEYS, _MAX_COUNT = ("layers", "depth", "experts"), 4096  # a larger count would build modules forever

_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
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
