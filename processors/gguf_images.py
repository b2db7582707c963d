"""The settings of image processors in the metadata of GGUF encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..mm.errors import ConfigError
from ..mm.gguf import short_float


def image_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what preprocessor_config.json would hold."""
    vision = {key.removeprefix("clip.vision."): value for key, value in metadata.items() if key.startswith("clip.vision.")}
    found: dict[str, Any] = {key: _channels(key, vision[key]) for key in ("image_mean", "image_std") if key in vision}
    size, patch = vision.get("image_size"), vision.get("patch_size")
    match metadata.get("clip.projector_type"):
        case "gemma3":
            return found | {"size": {"height": size, "width": size}}
        case "pixtral":
            return found | {"size": {"longest_edge": size}}
        case "idefics3":
            edge = vision.get("preproc_image_size") or 4 * vision["image_size"]
            return found | {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": size}}
    bounds = {"image_min_pixels": "min_pixels", "image_max_pixels": "max_pixels"}
    found |= {new: vision[old] for old, new in bounds.items() if old in vision}
    return found | {"patch_size": patch, "merge_size": vision.get("spatial_merge_size", 2)}


def _channels(key: str, value: object) -> list[float]:
    if not isinstance(value, np.ndarray) or value.shape != (3,) or value.dtype != np.float32:
        raise ConfigError(f"clip.vision.{key} is not a list of three numbers; use another file of the encoder")
    return [short_float(number) for number in value]
