"""Decode an image in any accepted form to RGB pixels."""

from __future__ import annotations

import io
import math
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ...callers.errors import InputError
from ..hashing import digest
from ..types import MediaHeader
from .animations import Animation, is_animation, opened_animation
from .formats import wrong_format_error
from .image_pages import is_heif, is_tiff, pieces_error, tiff_pages
from .orientation import has_swapped_sides
from .pixels import channels_last, upright_rgb
from .policy import MediaPolicy, check_size

_EXIF_ORIENTATION = 0x0112
_PNG_START = 8
_MAX_CHUNKS = 1 << 18  # chunks of a PNG that are searched: two gigabytes of the usual size
_MAX_READS = 1 << 16  # reads of a header: Pillow needs a few dozen, and minutes for an endless header
_MAX_EXIF = 1 << 20  # bytes
_MAX_INLINE = 32 << 20  # pixels; the slowest image of these takes a second, and a WebP holds the lock for 0.2 s
_CODEC_BYTES = {"WEBP": 10, "AVIF": 10, "HEIF": 10, "JPEG2000": 18, "GIF": 1, "TIFF": 8}  # bytes per pixel in the codec
_MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}  # bytes per pixel in Pillow; others: 4
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")  # a JPEG marker outside a scan
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "QOI", "HEIF")
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


def probe_image(value: object, policy: MediaPolicy, page: int | None = None) -> MediaHeader:
    """Return the size after EXIF orientation, from the header alone. It equals the size of `decode_image`.

    The only exception is a lazy PIL image of a PNG whose orientation is stored after its pixels.

    Raises:
        InputError: an error of `decode_image` that shows in the header.
    """
    if isinstance(value, np.ndarray | Tensor):
        height, width = channels_last(value, policy).shape[:2]
        return MediaHeader("image", int(height), int(width))
    if page is not None and isinstance(value, bytes) and is_animation(value):
        with _readable(value), opened_animation(value, policy, None, partial(_open_first, value, policy)) as animation:
            size, orientation = _size_of_page(animation, page, policy), animation.orientation
    else:
        with opened_image(value, policy, load=False, page=page) as (image, orientation):
            size = image.size
    width, height = size[::-1] if has_swapped_sides(orientation) else size
    return MediaHeader("image", height, width)


def decode_image(value: object, policy: MediaPolicy, page: int | None = None) -> Tensor:
    """Return uint8 `[height, width, 3]` of encoded bytes, a PIL image, or a uint8 array or tensor (HWC, CHW or HW).

    `page`: number of a page of encoded bytes, from 1: of a TIFF without its thumbnails, or a frame of an animation.

    EXIF orientation is applied, transparency is blended with the policy's background, every mode becomes RGB (16-bit grey
    keeps its upper byte), color profiles are ignored, and animations give their first frame.

    Raises:
        InputError: another form, a broken or truncated file, or more than `policy.max_pixels` pixels.
    """
    return _decode(value, policy, page)[1]


def hash_image(value: object, policy: MediaPolicy) -> str:
    """Return the hash of the content: of encoded bytes and the background, or else of the mode and the decoded pixels."""
    if isinstance(value, bytes):
        return digest("encoded", value, policy.background)
    return digest("pixels", *_decode(value, policy))


def _decode(value: object, policy: MediaPolicy, page: int | None = None) -> tuple[str, Tensor]:
    """Return `(mode of the source, pixels)`."""
    if isinstance(value, np.ndarray | Tensor):
        pixels = channels_last(value, policy)
        if pixels.shape[2] == 4:
            return "RGBA", upright_rgb(Image.fromarray(pixels.contiguous().numpy(), "RGBA"), 1, policy)
        return ("RGB", pixels) if pixels.shape[2] == 3 else ("L", pixels.expand(-1, -1, 3))
    with opened_image(value, policy, page=page) as (image, orientation):
        mode = image.mode
        size = image.size
        image.load()
        if image.size != size:
            raise InputError(f"it is broken (its header says {size[0]}x{size[1]}, its pixels {image.width}x{image.height})")
        return mode, upright_rgb(image, orientation, policy)


def count_pages(data: bytes, policy: MediaPolicy) -> tuple[int, float]:
    """Return the number of pages of a file, without thumbnails, and the seconds of CPU time that this took.

    A TIFF is counted up to one page above `policy.max_pdf_pages`.
    """
    began = time.thread_time()
    if is_animation(data):
        with _readable(data), opened_animation(data, policy, None, partial(_open_first, data, policy)) as animation:
            return len(animation.sizes), time.thread_time() - began
    with opened_image(data, policy, page=1) as (image, _):
        count = len(tiff_pages(data, policy, policy.max_pdf_pages + 1)) if is_tiff(data) else getattr(image, "n_frames", 1)
    return count, time.thread_time() - began


def is_slow(data: bytes, policy: MediaPolicy) -> bool:
    """Return whether decoding may take a second, or hold the interpreter's lock for long.

    The lock is held by the decoders of JPEG 2000, WebP and AVIF, and by those in Python (QOI).
    """
    with suppress(InputError, *_BROKEN), _open(data, policy) as image:  # a broken header is refused later
        in_python = any(tile[0] in Image.DECODERS for tile in getattr(image, "tile", ()))
        return image.format == "JPEG2000" or in_python or image.width * image.height > _MAX_INLINE
    return False


@contextmanager
def opened_image(
    value: object, policy: MediaPolicy, load: bool = True, page: int | None = None
) -> Iterator[tuple[Image.Image, int]]:
    """Yield a PIL image within the limits, and its EXIF orientation. Errors inside become InputErrors about the image.

    Args:
        load: decode a caller's lazy image. A TIFF is always decoded, because Pillow orients it then.
        page: number of a page of encoded bytes, from 1; None: the first, and a TIFF must have no other.
    """
    if not isinstance(value, bytes | Image.Image):
        raise InputError(
            f"a value of type {type(value).__name__} is not a known form; give bytes, a path, a data: URL or pixels; "
            "several images are several items"
        )
    if isinstance(value, bytes) and not value:
        raise InputError("it is empty")
    with _readable(value):
        if isinstance(value, Image.Image):
            check_size(value.height, value.width, policy)
            with _LOADING:
                if load or value.format == "TIFF":
                    value.load()
                orientation = _orientation(partial(Image.Image.getexif, value))  # a PNG's own method would load the pixels
            yield value, orientation
        elif page is not None and is_animation(value):
            with opened_animation(value, policy, page, partial(_open_first, value, policy)) as animation:
                _size_of_page(animation, page, policy)
                animation.image.seek(page - 1)
                _check_limits(animation.image, value, policy)
                yield animation.image, animation.orientation
        else:
            with _open(value, policy, page) as image:
                _check_limits(image, value, policy)
                if page is not None:
                    _seek(image, value, page, policy)
                    _check_limits(image, value, policy)  # pages of a TIFF differ in size
                # Pillow orients a TIFF itself and swaps its size
                yield image, 1 if image.format == "TIFF" else _orientation(partial(_header_exif, image, value))


@contextmanager
def _readable(value: object) -> Iterator[None]:
    """Turn exceptions of Pillow inside the context into InputErrors about the image."""
    try:
        yield
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError(wrong_format_error(value if isinstance(value, bytes) else b"", "image")) from None
    except _BROKEN as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        if "MAX_TEXT" in text:  # the name of a limit in Pillow
            raise InputError("its texts or its color profile are too large; save it again without them") from None
        if isinstance(value, Image.Image) and "closed" in text:
            raise InputError("it is a Pillow image that was closed; give it before it is closed, or its file") from None
        raise InputError(f"it is broken or cut off ({text}); download or save it again") from None


def _open_first(data: bytes, policy: MediaPolicy) -> tuple[Image.Image, int]:
    """Open an animation at its first frame. Return it with its orientation."""
    image = _open(data, policy, 1)
    _check_limits(image, data, policy)
    return image, _orientation(partial(_header_exif, image, data))


def _size_of_page(animation: Animation, page: int, policy: MediaPolicy) -> tuple[int, int]:
    """Return width and height of a frame, within the limits."""
    _check_page(page, len(animation.sizes))
    width, height = animation.sizes[page - 1]
    check_size(height, width, policy)
    return width, height


def _check_page(page: int, count: int) -> None:
    if page > count:
        raise InputError(f"it has {count:,} pages, so it has no page {page}; pages count from 1")


def _open(data: bytes, policy: MediaPolicy, page: int | None = None) -> Image.Image:
    """Open with Pillow's readers of pixel formats, which start no program, and without its global size limit."""
    Image.init()
    if is_tiff(data) and page is None and len(tiff_pages(data, policy, 2)) > 1:
        raise InputError("it has several pages; give its pages: sensorium.pdf_pages(file)")
    if is_heif(data):
        _register_heif()
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


def _check_limits(image: Image.Image, data: bytes, policy: MediaPolicy) -> None:
    check_size(image.height, image.width, policy)
    _check_cost(image, data, policy)


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
        raise InputError(
            f"{text}, {limit}; scale it down or raise the limit",
            code="over_limit",
            param="max_decoded_bytes",
            limit=policy.max_decoded_bytes,
        )


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
                raise InputError(text, code="over_limit", param="max_jpeg_scans", limit=policy.max_jpeg_scans)
        if match[1] not in (b"\x01", b"\xd8"):
            position += int.from_bytes(data[position : position + 2], "big")
    raise pieces_error(policy)


def _register_heif() -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        text = "it is a HEIC image, which needs pillow-heif: pip install 'sensorium[heif]'; or convert it to JPEG or PNG"
        raise InputError(text) from None
    register_heif_opener(thumbnails=False)


def _seek(image: Image.Image, data: bytes, page: int, policy: MediaPolicy) -> None:
    """Go to a page, counted from 1 without thumbnails."""
    frames = tiff_pages(data, policy, page) if is_tiff(data) else range(getattr(image, "n_frames", 1))
    _check_page(page, len(frames))
    if frames[page - 1]:
        image.seek(frames[page - 1])


def _reduce_transparent_color(image: Image.Image) -> None:
    """Reduce the transparent color of 16-bit RGB to the upper bytes that Pillow keeps; near colors become transparent too."""
    clear, tiles = image.info.get("transparency"), getattr(image, "tile", ())
    if isinstance(clear, tuple) and tiles and tiles[0][3] == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def _header_exif(image: Image.Image, data: bytes) -> Image.Exif:
    """Return EXIF without decoding pixels. Pillow would decode a PNG to find EXIF that is stored after its pixels."""
    if len(image.info.get("exif", b"")) > _MAX_EXIF:
        raise InputError(
            f"its EXIF is over the limit of {_MAX_EXIF:,} bytes; save it without", code="over_limit", limit=_MAX_EXIF
        )
    if image.format != "PNG":
        return image.getexif()
    position = _PNG_START if "exif" not in image.info and b"eXIf" in data else len(data)
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(data):
            break
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        if kind == b"eXIf" and length <= _MAX_EXIF:
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
    return value if isinstance(value, int) and 1 <= value <= 8 else 1
