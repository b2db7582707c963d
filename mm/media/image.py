"""Decode an image in any accepted form to RGB pixels."""

from __future__ import annotations

import io
import math
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import InputError
from ..hashing import digest
from ..types import MediaHeader
from .formats import wrong_format_error
from .policy import MediaPolicy, check_size

_EXIF_ORIENTATION = 0x0112
_UPRIGHT: dict[int, Callable[[Any], Any]] = {  # EXIF orientation -> view of an upright array in the order of the file's pixels
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}
_PNG_START = 8
_MAX_CHUNKS = 1 << 18  # chunks of a PNG that are searched: two gigabytes of the usual size
_MAX_READS = 1 << 16  # reads of a header: Pillow needs a few dozen, and minutes for an endless header
_MOST_EXIF = 1 << 20  # bytes
_MOST_INLINE = 32 << 20  # pixels; the slowest image of these takes a second, and a WebP holds the lock for 0.2 s
_STRIP_PIXELS = 1 << 18  # converted at a time
_CODEC_BYTES = {"WEBP": 10, "AVIF": 10, "JPEG2000": 18, "GIF": 1, "TIFF": 8}  # bytes per pixel in the codec
_MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}  # bytes per pixel in Pillow; others: 4
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")  # a JPEG marker outside a scan
_STRIP_TAGS = (273, 279, 324, 325)  # TIFF tags: places and sizes of strips and tiles
_SUBFILE_TAG, _REDUCED = 254, 1  # TIFF tag of a page's kind, and its bit of a thumbnail
_SUBFILE_BYTES = {3: 2, 4: 4}  # bytes of its value by type, SHORT or LONG
_MAX_THUMBNAILS = 64  # pages of a TIFF that are looked at
_PLAIN_TYPES = (1, 2, 6, 7)  # types of TIFF values that Pillow keeps as bytes
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
    """Return the size after EXIF orientation, from the header alone. It equals the size of `decode_image`.

    The only exception is a lazy PIL image of a PNG whose orientation is stored after its pixels.

    Raises:
        InputError: an error of `decode_image` that shows in the header.
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
    """Return the hash of the content: of encoded bytes and the background, or else of the mode and the decoded pixels."""
    if isinstance(value, bytes):
        return digest("encoded", value, policy.background)
    return digest("pixels", *_decode(value, policy))


def _decode(value: object, policy: MediaPolicy) -> tuple[str, Tensor]:
    """Return `(mode of the source, pixels)`."""
    if isinstance(value, np.ndarray | Tensor):
        pixels = _channels_last(value, policy)
        if pixels.shape[2] == 4:
            return "RGBA", _to_rgb(Image.fromarray(pixels.contiguous().numpy(), "RGBA"), 1, policy)
        return ("RGB", pixels) if pixels.shape[2] == 3 else ("L", pixels.expand(-1, -1, 3))
    with _opened(value, policy) as (image, orientation):
        mode = image.mode
        size = image.size
        image.load()
        if image.size != size:
            raise InputError(f"it is broken (its header says {size[0]}x{size[1]}, its pixels {image.width}x{image.height})")
        return mode, _to_rgb(image, orientation, policy)


def is_slow(data: bytes, policy: MediaPolicy) -> bool:
    """Return whether decoding may take a second, or hold the interpreter's lock for long.

    The lock is held by the decoders of JPEG 2000, WebP and AVIF, and by those in Python (QOI).
    """
    with suppress(InputError, *_BROKEN), _open(data, policy) as image:  # a broken header is refused later
        in_python = any(tile[0] in Image.DECODERS for tile in getattr(image, "tile", ()))
        return image.format == "JPEG2000" or in_python or image.width * image.height > _MOST_INLINE
    return False


@contextmanager
def _opened(value: object, policy: MediaPolicy, load: bool = True) -> Iterator[tuple[Image.Image, int]]:
    """Yield a PIL image within the limits, and its EXIF orientation. Errors inside become InputErrors about the image.

    `load`: decode a caller's lazy image. A TIFF is always decoded, because Pillow orients it then.
    """
    if not isinstance(value, bytes | Image.Image):
        raise InputError(
            f"a value of type {type(value).__name__} is not a known form; give bytes, a path, a data: URL or pixels; "
            "several images are several items"
        )
    if isinstance(value, bytes) and not value:
        raise InputError("it is empty")
    try:
        if isinstance(value, Image.Image):
            check_size(value.height, value.width, policy)
            with _LOADING:
                if load or value.format == "TIFF":
                    value.load()
                orientation = _orientation(partial(Image.Image.getexif, value))  # a PNG's own method would load the pixels
            yield value, orientation
        else:
            with _open(value, policy) as image:
                check_size(image.height, image.width, policy)
                _check_cost(image, value, policy)
                # Pillow orients a TIFF itself and swaps its size
                yield image, 1 if image.format == "TIFF" else _orientation(partial(_header_exif, image, value))
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError(wrong_format_error(value if isinstance(value, bytes) else b"", "image")) from None
    except _BROKEN as error:
        raise InputError(f"it is broken or cut off ({' '.join(str(error).split())[:200] or type(error).__name__})") from None


def _open(data: bytes, policy: MediaPolicy) -> Image.Image:
    """Open with Pillow's readers of pixel formats, which start no program, and without its global size limit."""
    Image.init()
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        _check_tiff(data, policy)
    for name in _FORMATS:
        reader, accepts = Image.OPEN.get(name, (None, None))
        if reader is not None and accepts is not None and accepts(data[:16]) is True:
            try:
                file = _Counted(data)
                image = reader(file, "")
            except (SyntaxError, IndexError, TypeError, struct.error):  # raised by a reader for another format
                continue
            # Pillow reads a chunk of a PNG by four calls or less; other readers may take their pixels one by one
            file.left = _MAX_READS + 4 * policy.max_image_pieces if name == "PNG" else math.inf
            _reduce_transparent_color(image)
            return image
    raise UnidentifiedImageError


class _Counted(io.BytesIO):
    """A file that refuses to be read in very many small pieces."""

    left: float = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise InputError("it consists of too many small pieces; the file is broken or hostile")
        return super().read(size)


def _check_cost(image: Image.Image, data: bytes, policy: MediaPolicy) -> None:
    """Refuse an image whose decoding would hold too many bytes: the codec's buffers, Pillow's pixels and ours."""
    each = 3 + _MODE_BYTES.get(image.mode, 4) + _CODEC_BYTES.get(image.format or "", 0)
    if data.startswith(b"\xff\xd8") and _count_scans(data, policy) > 1:  # all coefficients are kept until the last scan
        each += 2 * len(image.getbands())
    if any(tile[0] in Image.DECODERS for tile in getattr(image, "tile", ())):
        each += 8
    needed = each * image.width * image.height
    if needed > policy.max_decoded_bytes:
        text = f"decoding its {image.width}x{image.height} pixels holds {needed:,} bytes"
        limit = f"the limit max_decoded_bytes is {policy.max_decoded_bytes:,}"
        raise InputError(f"{text}, {limit}; scale it down or raise the limit", param="max_decoded_bytes")


def _count_scans(data: bytes, policy: MediaPolicy) -> int:
    """Count the scans of a JPEG. Each goes over all coefficients, however few bytes it has."""
    position = 2
    scans = 0
    for _ in range(policy.max_image_pieces):
        match = _MARKER.search(data, position)
        if match is None or match[1] == b"\xd9":
            return scans
        position = match.end()
        if match[1] == b"\xda":
            scans += 1
            if scans > policy.max_jpeg_scans:
                text = f"it has more than {policy.max_jpeg_scans} scans (media: max_jpeg_scans); save it again with fewer"
                raise InputError(text, param="max_jpeg_scans")
        if match[1] not in (b"\x01", b"\xd8"):
            position += int.from_bytes(data[position : position + 2], "big")
    raise _pieces_error(policy)


def _check_tiff(data: bytes, policy: MediaPolicy) -> None:
    """Refuse a TIFF of several pages, with very many strips, or with other lists of numbers that Pillow would read whole."""
    order, big = "<" if data[:2] == b"II" else ">", b"+" in data[2:4]
    offset, count, entry, pointer = ("8xQ", "Q", "HHQQ", "Q") if big else ("4xI", "H", "HHII", "I")
    try:
        (start,) = struct.unpack_from(order + offset, data)
        visited = {0}
        for number in range(_MAX_THUMBNAILS):
            if start in visited:  # the end, or a page that points back
                return
            visited.add(start)
            (entries,) = struct.unpack_from(order + count, data, start)
            start += struct.calcsize(order + count)
            end = start + min(entries, 1 << 16) * struct.calcsize(order + entry)
            subfile = 0
            for tag, kind, values, value in struct.iter_unpack(order + entry, data[start:end]):
                most = policy.max_image_pieces if tag in _STRIP_TAGS else max(policy.max_image_pieces, 3 << 16)
                if values > most and kind not in _PLAIN_TYPES:
                    raise _pieces_error(policy)
                if tag == _SUBFILE_TAG:  # stored in the first bytes of the field
                    unused = struct.calcsize(pointer) - _SUBFILE_BYTES.get(kind, 4)
                    subfile = value >> 8 * unused if order == ">" else value
            if number and not subfile & _REDUCED:
                how = "[page.copy() for page in PIL.ImageSequence.Iterator(image)]"
                raise InputError(f"it has several pages; give each page as an image, as in {how}")
            (start,) = struct.unpack_from(order + pointer, data, end)
    except struct.error:
        return  # cut off: Pillow raises the error


def _pieces_error(policy: MediaPolicy) -> InputError:
    text = (
        f"it has more than {policy.max_image_pieces:,} strips or segments (media: max_image_pieces); save it again with fewer"
    )
    return InputError(text, param="max_image_pieces")


def _reduce_transparent_color(image: Image.Image) -> None:
    """Reduce the transparent color of 16-bit RGB to the upper bytes that Pillow keeps; near colors become transparent too."""
    clear, tiles = image.info.get("transparency"), getattr(image, "tile", ())
    if isinstance(clear, tuple) and tiles and tiles[0][3] == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def _header_exif(image: Image.Image, data: bytes) -> Image.Exif:
    """Return EXIF without decoding pixels. Pillow would decode a PNG to find EXIF that is stored after its pixels."""
    if len(image.info.get("exif", b"")) > _MOST_EXIF:
        raise InputError(f"its EXIF is over the limit of {_MOST_EXIF:,} bytes; save it without")
    if image.format != "PNG":
        return image.getexif()
    position = _PNG_START if "exif" not in image.info and b"eXIf" in data else len(data)
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(data):
            break
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        if kind == b"eXIf" and length <= _MOST_EXIF:
            image.info["exif"] = data[position + 8 : position + 8 + length]
        position += length + 12
    return Image.Image.getexif(image)


def _orientation(exif: Callable[[], Image.Exif]) -> int:
    """Return 1 to 8; 1 if there is no valid orientation, also if EXIF is broken."""
    try:
        value = exif().get(_EXIF_ORIENTATION, 1)
    except InputError:
        raise
    except _BROKEN:
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


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


def _channels_last(value: np.ndarray[Any, Any] | Tensor, policy: MediaPolicy) -> Tensor:
    if value.ndim == 2:
        value = value[..., None]
    if value.ndim != 3:
        raise InputError(f"an image must have 2 or 3 axes, not {value.ndim}; give several images as a list")
    pixels = to_hwc(value)
    check_size(pixels.shape[0], pixels.shape[1], policy)
    return pixels


def _to_rgb(image: Image.Image, orientation: int, policy: MediaPolicy) -> Tensor:
    """Return upright RGB. Strips of the image are converted one after another, so that only the result is a copy."""
    width, height = image.size
    upright = np.empty((width, height, 3) if orientation >= 5 else (height, width, 3), np.uint8)
    stored = _UPRIGHT[orientation](upright) if orientation in _UPRIGHT else upright
    deep = image.mode == "I" and image.getextrema()[1] > 255  # type: ignore[operator]  # one band
    lines = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, lines):
        strip = image.crop((0, top, width, min(height, top + lines)))
        stored[top : top + lines] = _strip_to_rgb(strip, deep, policy)
    return torch.from_numpy(upright)


def _strip_to_rgb(image: Image.Image, deep: bool, policy: MediaPolicy) -> np.ndarray[Any, Any]:
    clear = image.info.get("transparency")
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.asarray(image)
        pixels = np.repeat(_upper_byte(grey, deep)[..., None], 3, 2)
        if isinstance(clear, int):
            pixels[grey == clear] = policy.background
        return pixels
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or clear is not None:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        ground = Image.new("RGBA", image.size, (*policy.background, 255))
        image = Image.alpha_composite(ground, image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _upper_byte(grey: np.ndarray[Any, Any], deep: bool) -> np.ndarray[Any, Any]:
    """Convert 16-bit grey by its upper byte. 32-bit values are kept unless some of the image are `deep`: over 8 bits."""
    if grey.dtype.kind == "f" or (not deep and grey.dtype.itemsize > 2):
        grey = np.nan_to_num(grey).clip(0, 255)
    else:
        grey = grey.clip(0, 65535) >> 8
    return grey.astype(np.uint8)
