"""Decode an image in any accepted form to RGB pixels."""

from __future__ import annotations

import io
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import InputError
from ..hashing import digest
from ..types import MediaHeader
from .policy import MediaPolicy, check_size

_EXIF_ORIENTATION = 0x0112
_TURNS = {  # EXIF orientation -> the transposition that undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG_START = 8
_MOST_CHUNKS = 1 << 18  # of a PNG that are looked at: two gigabytes in the usual pieces
_MOST_READS = 1 << 16  # of a header: Pillow reads the usual ones in a few dozen, and endless ones for minutes
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "QOI")
_LOADING = threading.Lock()  # a caller's lazy image may be in several prompts; Pillow loads it without a lock
# Exceptions of Pillow's readers on broken files, besides UnidentifiedImageError (an OSError).
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    EOFError,
    RuntimeError,
    AssertionError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Warning,  # if the caller turns warnings into errors
)


def probe_image(value: object, policy: MediaPolicy) -> MediaHeader:
    """Return the size after EXIF orientation, from the header alone. It is always that of `decode_image`.

    One exception: a lazy PIL image of a PNG whose orientation is stored after its pixels.

    Raises:
        InputError: as `decode_image`, as far as the header tells.
    """
    if isinstance(value, np.ndarray | Tensor):
        height, width = _channels_last(value, policy).shape[:2]
        return MediaHeader("image", int(height), int(width))
    with _opened(value, policy, load=False) as (image, orientation):
        width, height = image.size if orientation < 5 else image.size[::-1]
        return MediaHeader("image", height, width)


def decode_image(value: object, policy: MediaPolicy) -> Tensor:
    """Return uint8 `[height, width, 3]` of encoded bytes, a PIL image, or a uint8 array or tensor (HWC, CHW or HW).

    EXIF orientation is applied, transparency is blended with the policy's background, every mode becomes RGB (16-bit grey
    keeps its upper byte), color profiles are ignored, and animations give their first frame.

    Raises:
        InputError: another form, a broken or truncated file, or more than `policy.max_pixels` pixels.
    """
    return _decode(value, policy)[1]


def hash_image(value: object, policy: MediaPolicy) -> str:
    """Return the identity of the content: of encoded bytes as they are, else of mode and pixels. The background counts."""
    if isinstance(value, bytes):
        return digest("encoded", value, policy.background)
    return digest("pixels", *_decode(value, policy))


def _decode(value: object, policy: MediaPolicy) -> tuple[str, Tensor]:
    """Return `(mode of the source, pixels)`."""
    if isinstance(value, np.ndarray | Tensor):
        pixels = _channels_last(value, policy)
        if pixels.shape[2] == 4:
            return "RGBA", _flat(Image.fromarray(pixels.contiguous().numpy(), "RGBA"), policy)
        return ("RGB", pixels) if pixels.shape[2] == 3 else ("L", pixels.expand(-1, -1, 3))
    with _opened(value, policy) as (image, orientation):
        mode = image.mode
        size = image.size
        image.load()
        if image.size != size:
            raise InputError(f"it is broken (its header says {size[0]}x{size[1]}, its pixels {image.width}x{image.height})")
        if orientation in _TURNS:
            image = image.transpose(_TURNS[orientation])
        return mode, _to_rgb(image, policy)


@contextmanager
def _opened(value: object, policy: MediaPolicy, load: bool = True) -> Iterator[tuple[Image.Image, int]]:
    """Yield a PIL image within the limits, and its EXIF orientation. Errors inside become InputErrors about the image.

    `load`: decode a caller's lazy image. A TIFF is always decoded, because Pillow orients it then.
    """
    if not isinstance(value, bytes | Image.Image):
        raise InputError(
            f"a value of type {type(value).__name__} is not a known form; give bytes, a path, a data: URL or pixels"
        )
    if isinstance(value, bytes) and not value:
        raise InputError("it is empty")
    try:
        if isinstance(value, Image.Image):
            check_size(value.height, value.width, policy)
            with _LOADING:
                if load or value.format == "TIFF":
                    value.load()
                orientation = _orientation(partial(Image.Image.getexif, value))  # a PNG's own would load it
            yield value, orientation
        else:
            with _open(value) as image:
                check_size(image.height, image.width, policy)
                # Pillow orients a TIFF itself and swaps its size
                yield image, 1 if image.format == "TIFF" else _orientation(partial(_header_exif, image, value))
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError("it is not in an image format that can be read") from None
    except _BROKEN as error:
        raise InputError(f"it is broken or cut off ({' '.join(str(error).split())[:200] or type(error).__name__})") from None


def _open(data: bytes) -> Image.Image:
    """Open with Pillow, without its global size limit and only formats of pixels, whose readers start no program."""
    Image.init()
    for name in _FORMATS:
        reader, accepts = Image.OPEN.get(name, (None, None))
        if reader is not None and accepts is not None and accepts(data[:16]) is True:
            try:
                file = _Counted(data)
                image = reader(file, "")
            except (SyntaxError, IndexError, TypeError, struct.error):  # how a reader says that it is not its format
                continue
            # a PNG of half a gigabyte in the usual chunks needs as many; other readers may take their pixels one by one
            file.left = _MOST_READS << 4 if name == "PNG" else math.inf
            _narrow_clear(image)
            return image
    raise UnidentifiedImageError


class _Counted(io.BytesIO):
    """A file that refuses to be read in very many small pieces."""

    left: float = _MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise InputError("it is in more small pieces than images are; the file is broken or hostile")
        return super().read(size)


def _narrow_clear(image: Image.Image) -> None:
    """Reduce the transparent color of 16-bit RGB to the upper bytes that Pillow keeps; near colors become transparent too."""
    clear, tiles = image.info.get("transparency"), getattr(image, "tile", ())
    if isinstance(clear, tuple) and tiles and tiles[0][3] == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def _header_exif(image: Image.Image, data: bytes) -> Image.Exif:
    """Return EXIF without decoding pixels, as Pillow would do for a PNG that has none before them."""
    if image.format != "PNG":
        return image.getexif()
    position = _PNG_START if "exif" not in image.info and b"eXIf" in data else len(data)
    for _ in range(_MOST_CHUNKS):
        if position + 8 > len(data):
            break
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        if kind == b"eXIf":
            image.info["exif"] = data[position + 8 : position + 8 + length]
        position += length + 12
    return Image.Image.getexif(image)


def _orientation(exif: Callable[[], Image.Exif]) -> int:
    """Return 1 to 8; 1 if there is no valid orientation, also if EXIF is broken."""
    try:
        value = exif().get(_EXIF_ORIENTATION, 1)
    except _BROKEN:
        return 1
    return value if isinstance(value, int) and value in _TURNS else 1


def to_hwc(array: np.ndarray[Any, Any] | Tensor) -> Tensor:
    """Return a uint8 array with 1, 3 or 4 channels last, or third from last, as `[..., h, w, c]` without copying."""
    if isinstance(array, np.ndarray):
        if array.dtype != np.uint8:
            raise InputError(f"pixels are uint8 (0-255), not {array.dtype}")
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    else:
        if array.dtype != torch.uint8:
            raise InputError(f"pixels are uint8 (0-255), not {str(array.dtype).removeprefix('torch.')}")
        if array.layout is not torch.strided or array.is_meta:
            raise InputError(f"pixels are a dense tensor, not {array.layout} on {array.device}")
        tensor = array.detach().cpu()
    if tensor.shape[-1] not in (1, 3, 4):
        if tensor.shape[-3] not in (1, 3, 4):
            raise InputError(f"shape {tuple(tensor.shape)} has no axis of 1, 3 or 4 channels, last or first")
        tensor = tensor.movedim(-3, -1)
    if 0 in tensor.shape:
        raise InputError(f"shape {tuple(tensor.shape)} has no pixels")
    return tensor


def _channels_last(value: np.ndarray[Any, Any] | Tensor, policy: MediaPolicy) -> Tensor:
    if value.ndim == 2:
        value = value[..., None]
    if value.ndim != 3:
        raise InputError(f"an image has 2 or 3 axes, not {value.ndim}; give several images as a list")
    pixels = to_hwc(value)
    check_size(pixels.shape[0], pixels.shape[1], policy)
    return pixels


def _to_rgb(image: Image.Image, policy: MediaPolicy) -> Tensor:
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.asarray(image)
        pixels, clear = _from_deep(grey), image.info.get("transparency")
        if isinstance(clear, int):
            pixels[torch.from_numpy(grey == clear)] = torch.tensor(policy.background, dtype=torch.uint8)
        return pixels
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _flat(image, policy)
    return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB")))


def _flat(image: Image.Image, policy: MediaPolicy) -> Tensor:
    """Blend transparency with the background."""
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    ground = Image.new("RGBA", image.size, (*policy.background, 255))
    return torch.from_numpy(np.array(Image.alpha_composite(ground, image).convert("RGB")))


def _from_deep(grey: np.ndarray[Any, Any]) -> Tensor:
    """Convert 16-bit grey by its upper byte; 32-bit values that fit 8 bits are kept."""
    if grey.dtype.kind == "f" or (grey.max(initial=0) <= 255 and grey.dtype.itemsize > 2):
        byte = np.nan_to_num(grey).clip(0, 255).astype(np.uint8)
    else:
        byte = (grey.clip(0, 65535) >> 8).astype(np.uint8)
    return torch.from_numpy(np.repeat(byte[..., None], 3, 2))
