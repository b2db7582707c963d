"""The settings of image processors in the metadata of GGUF encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...callers.errors import ConfigError, short_repr
from .reader import short_float

_SIZES = ("image_size", "patch_size", "spatial_merge_size", "preproc_image_size", "image_min_pixels", "image_max_pixels")


def image_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a preprocessor_config.json."""
    vision = {key.removeprefix("clip.vision."): value for key, value in metadata.items() if key.startswith("clip.vision.")}
    settings: dict[str, Any] = {key: _channels(key, vision[key]) for key in ("image_mean", "image_std") if key in vision}
    sizes = {key: _size(key, vision[key]) for key in _SIZES if key in vision}
    size = sizes.get("image_size", 224)
    match metadata.get("clip.projector_type"):
        case "gemma3":
            return settings | {"size": {"height": size, "width": size}}
        case "mlp":
            return settings | {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
        case "pixtral":
            return settings | {"size": {"longest_edge": size}}
        case "idefics3":
            edge = sizes.get("preproc_image_size", 4 * size)
            return settings | {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": size}}
    names = {"patch_size": "patch_size", "image_min_pixels": "min_pixels", "image_max_pixels": "max_pixels"}
    settings |= {new: sizes[old] for old, new in names.items() if old in sizes}
    return settings | {"merge_size": sizes.get("spatial_merge_size", 2)}


def _size(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"clip.vision.{key} is {short_repr(value)}, not a number of pixels; use another file of the encoder")
    return value


def _channels(key: str, value: object) -> list[float]:
    if not isinstance(value, np.ndarray) or value.shape != (3,) or value.dtype != np.float32:
        raise ConfigError(f"clip.vision.{key} is not a list of three numbers; use another file of the encoder")
    return [short_float(number) for number in value]
