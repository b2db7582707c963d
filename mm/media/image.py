"""One picture in any form a caller may give, as RGB pixels. Knows no family, no limits on counts and no network."""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..errors import MediaError
from ..hashing import digest
from ..types import ImageItem

MAX_PIXELS = 178_956_970  # Pillow's own limit: a quarter GiB of 24-bit pixels, doubled
_WHITE = (255, 255, 255, 255)


def load_image(value: object, index: int, max_pixels: int = MAX_PIXELS) -> ImageItem:
    """An ImageItem from a PIL image, a uint8 array or tensor (HWC, CHW or HW), encoded bytes, a data: URL or a local path.

    EXIF orientation is applied, transparency laid on white, every mode becomes RGB (16-bit grey keeps its upper
    byte), animations give their first frame. The size is checked before pixels are decoded.

    Raises:
        MediaError: anything else, a broken or cut-off file, more than `max_pixels` pixels, or an http(s) URL.
    """
    try:
        mode, pixels = decode_image(value, max_pixels)
    except MediaError as error:
        raise MediaError("image", index, error.reason) from None
    return ImageItem(pixels, digest("image", mode, pixels))


def decode_image(value: object, max_pixels: int = MAX_PIXELS) -> tuple[str, Tensor]:
    """`(source mode, uint8 [height, width, 3])`; errors carry index 0, callers that count items name their own."""
    if isinstance(value, np.ndarray | Tensor):
        return _from_array(value, max_pixels)
    data = b"" if isinstance(value, Image.Image) else read_bytes(value, "image")
    if not data and not isinstance(value, Image.Image):
        raise MediaError("image", 0, "it is empty")
    try:
        if isinstance(value, Image.Image):
            return _from_pil(value, max_pixels)
        with Image.open(io.BytesIO(data)) as image:
            return _from_pil(image, max_pixels)
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError("image", 0, "it is not in a picture format that can be read") from None
    except Exception as error:  # a codec may raise anything on a hostile file
        raise MediaError("image", 0, f"it is broken or cut off ({error})") from None


def read_bytes(value: object, modality: str) -> bytes:
    """Encoded bytes of a bytes-like, a data: URL or a local path; MediaError names what else was given."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and value.startswith("data:"):
        return _from_data_url(value, modality)
    if isinstance(value, str) and "://" in value[:16]:
        raise MediaError(modality, 0, f"fetching {value.split('://')[0]} URLs is off; give bytes, a data: URL or a path")
    if not isinstance(value, str | os.PathLike):
        raise MediaError(
            modality, 0, f"a {type(value).__name__} is not a known form; give bytes, a data: URL, a path or pixels"
        )
    try:
        if not stat.S_ISREG(os.stat(value).st_mode):  # a pipe or device would never end
            raise MediaError(modality, 0, f"{str(value)[:200]!r} is not a regular file")
        with open(value, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MediaError(modality, 0, f"the file {str(value)[:200]!r} cannot be read ({reason})") from None


def to_hwc(array: np.ndarray[Any, Any] | Tensor, modality: str) -> Tensor:
    """A uint8 array with 1, 3 or 4 channels last or, failing that, third from last, as `[..., h, w, c]`, not copied."""
    if isinstance(array, np.ndarray):
        if array.dtype != np.uint8:
            raise MediaError(modality, 0, f"pixels are uint8 (0-255), not {array.dtype}")
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    else:
        if array.dtype != torch.uint8:
            raise MediaError(modality, 0, f"pixels are uint8 (0-255), not {str(array.dtype).removeprefix('torch.')}")
        tensor = array.detach().cpu()
    if tensor.shape[-1] not in (1, 3, 4):
        if tensor.shape[-3] not in (1, 3, 4):
            raise MediaError(modality, 0, f"shape {tuple(tensor.shape)} has no axis of 1, 3 or 4 channels, last or first")
        tensor = tensor.movedim(-3, -1)
    if 0 in tensor.shape:
        raise MediaError(modality, 0, f"shape {tuple(tensor.shape)} has no pixels")
    return tensor


def _from_array(value: np.ndarray[Any, Any] | Tensor, max_pixels: int) -> tuple[str, Tensor]:
    if value.ndim == 2:
        value = value[..., None]
    if value.ndim != 3:
        raise MediaError("image", 0, f"a picture has 2 or 3 axes, not {value.ndim}; give several pictures as a list")
    pixels = to_hwc(value, "image")
    _check_budget(pixels.shape[1], pixels.shape[0], max_pixels)
    channels = pixels.shape[2]
    if channels == 4:
        return "RGBA", _on_white(Image.fromarray(pixels.contiguous().numpy(), "RGBA"))
    return ("RGB", pixels) if channels == 3 else ("L", pixels.expand(-1, -1, 3))


def _from_pil(image: Image.Image, max_pixels: int) -> tuple[str, Tensor]:
    _check_budget(*image.size, max_pixels)
    mode = image.mode
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return mode, _on_white(image)
    if image.mode.startswith("I") or image.mode == "F":
        return mode, _from_deep(np.asarray(image))
    return mode, torch.from_numpy(np.array(image.convert("RGB")))


def _on_white(image: Image.Image) -> Tensor:
    image = image.convert("RGBA")
    return torch.from_numpy(np.array(Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")))


def _from_deep(grey: np.ndarray[Any, Any]) -> Tensor:
    """16-bit grey keeps its upper byte; 32-bit values that fit in 8 bits are taken as they are."""
    if grey.dtype.kind == "f" or (grey.max(initial=0) <= 255 and grey.dtype.itemsize > 2):
        byte = grey.clip(0, 255).astype(np.uint8)
    else:
        byte = (grey.clip(0, 65535).astype(np.int64) >> 8).astype(np.uint8)
    return torch.from_numpy(np.repeat(byte[..., None], 3, 2))


def _check_budget(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise MediaError("image", 0, f"{width}x{height} is over the limit of {max_pixels:,} pixels; scale it down")


def _from_data_url(url: str, modality: str) -> bytes:
    header, comma, body = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise MediaError(modality, 0, "a data: URL looks like data:<type>;base64,<data>")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError(modality, 0, "the data: URL does not hold valid base64") from None
