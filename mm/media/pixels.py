"""Pixels of arrays and of decoded images as uint8 RGB."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...callers.errors import InputError
from .grey import grey_bytes, grey_scale
from .orientation import as_stored, has_swapped_sides
from .policy import MediaPolicy, check_size

_STRIP_PIXELS = 1 << 18  # converted at a time


def to_hwc(array: np.ndarray[Any, Any] | Tensor) -> Tensor:
    """Return a uint8 array with 1, 3 or 4 channels last, or third from last, as `[..., h, w, c]` without copying."""
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype != "uint8":
        raise InputError(f"pixels must be uint8 (0-255), not {dtype}; convert them first; multiply fractions by 255")
    if isinstance(array, np.ndarray):
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    else:
        if array.layout is not torch.strided or array.is_meta:
            raise InputError(f"pixels must be a dense tensor, not {array.layout} on {array.device}")
        tensor = array.detach().cpu()
    if tensor.shape[-1] not in (1, 3, 4):
        if tensor.shape[-3] not in (1, 3, 4):
            raise InputError(f"shape {tuple(tensor.shape)} has no axis of 1, 3 or 4 channels, last or first")
        tensor = tensor.movedim(-3, -1)
    if 0 in tensor.shape:
        raise InputError(f"shape {tuple(tensor.shape)} has no pixels")
    return tensor


def channels_last(value: np.ndarray[Any, Any] | Tensor, policy: MediaPolicy) -> Tensor:
    if value.ndim == 2:
        value = value[..., None]
    if value.ndim != 3:
        raise InputError(f"an image must have 2 or 3 axes, not {value.ndim}; give several images as a list")
    pixels = to_hwc(value)
    check_size(pixels.shape[0], pixels.shape[1], policy)
    return pixels


def upright_rgb(image: Image.Image, orientation: int, policy: MediaPolicy) -> Tensor:
    """Return upright RGB. Strips of the image are converted one after another, so that only the result is a copy."""
    width, height = image.size
    upright = np.empty((width, height, 3) if has_swapped_sides(orientation) else (height, width, 3), np.uint8)
    stored = as_stored(upright, orientation)
    white = grey_scale(image) if image.mode in ("I", "F") else 65535.0
    lines = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, lines):
        strip = image.crop((0, top, width, min(height, top + lines)))
        stored[top : top + lines] = _strip_to_rgb(strip, white, policy)
    return torch.from_numpy(upright)


def _strip_to_rgb(image: Image.Image, white: float, policy: MediaPolicy) -> np.ndarray[Any, Any]:
    clear = image.info.get("transparency")
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.asarray(image)
        pixels = np.repeat(grey_bytes(grey, white)[..., None], 3, 2)
        if isinstance(clear, int):
            pixels[grey == clear] = policy.background
        return pixels
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or clear is not None:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        ground = Image.new("RGBA", image.size, (*policy.background, 255))
        image = Image.alpha_composite(ground, image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
