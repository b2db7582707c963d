"""Files that hold several pictures, which are used as pages: TIFF, animations (GIF, APNG, WebP, AVIF) and HEIC."""

from __future__ import annotations

import struct

from ...callers.errors import InputError
from .policy import MediaPolicy

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_STRIP_TAGS = (273, 279, 324, 325)  # TIFF tags: places and sizes of strips and tiles
_SUBFILE_TAG, _REDUCED = 254, 1  # TIFF tag of a page's kind, and its bit of a thumbnail
_SUBFILE_BYTES = {3: 2, 4: 4}  # bytes of its value by type, SHORT or LONG
_MAX_THUMBNAILS = 64  # pages of a TIFF that are looked at
_PLAIN_TYPES = (1, 2, 6, 7)  # types of TIFF values that Pillow keeps as bytes
_SEQUENCES = (b"avis", b"msf1", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
HEADER_BYTES = 1 << 20
"""First bytes of a file from which `may_hold_pages` tells."""
_ANIMATED = 2  # flag of a WebP
_MAX_CHUNKS = 1000  # of a PNG, before its pixels


def may_hold_pages(data: bytes) -> bool:
    """Return whether a file may hold several pictures, by its header."""
    if is_tiff(data) or data.startswith(b"GIF8"):
        return True
    if data.startswith(b"\x89PNG"):
        return _is_animated_png(data)
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X":
        return bool(data[20] & _ANIMATED) if len(data) > 20 else False
    return any(brand in _SEQUENCES for brand in brands(data))


def _is_animated_png(data: bytes) -> bool:
    """Return whether the chunk "acTL" stands before the pixels. Other chunks, of profiles and EXIF, may be long."""
    start = 8
    for _ in range(_MAX_CHUNKS):
        if data[start + 4 : start + 8] in (b"acTL", b"IDAT", b"IEND", b""):
            break
        start += 12 + int.from_bytes(data[start : start + 4], "big")  # length, type, content and checksum
    return data[start + 4 : start + 8] == b"acTL"


def is_tiff(data: bytes) -> bool:
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def is_heif(data: bytes) -> bool:
    """Return whether a file is a HEIC or HEIF image or sequence, which Pillow reads with pillow-heif only."""
    brand_names = brands(data)
    return any(brand in _HEIF_BRANDS for brand in brand_names) and not any(brand in _AVIF_BRANDS for brand in brand_names)


def brands(data: bytes) -> list[bytes]:
    """Return the brands of a file in the ISO base media format (ISO/IEC 14496-12, 4.3); none for other files."""
    end = min(int.from_bytes(data[:4], "big"), 256)
    return [data[8:12], *(data[at : at + 4] for at in range(16, end, 4))] if data[4:8] == b"ftyp" else []


def tiff_pages(data: bytes, policy: MediaPolicy, most: int) -> list[int]:
    """Return the positions of the first `most` pages of a TIFF that are no thumbnails.

    Raises:
        InputError: one has very many strips, or another list of numbers that Pillow would read whole.
    """
    order, big = "<" if data[:2] == b"II" else ">", b"+" in data[2:4]
    offset, count, entry, pointer = ("8xQ", "Q", "HHQQ", "Q") if big else ("4xI", "H", "HHII", "I")
    pages: list[int] = []
    try:
        (start,) = struct.unpack_from(order + offset, data)
        visited = {0}
        for number in range(_MAX_THUMBNAILS + 2 * most):
            if start in visited or len(pages) == most:  # the end, or a page that points back
                break
            visited.add(start)
            (entries,) = struct.unpack_from(order + count, data, start)
            start += struct.calcsize(order + count)
            end = start + min(entries, 1 << 16) * struct.calcsize(order + entry)
            subfile = 0
            for tag, kind, values, value in struct.iter_unpack(order + entry, data[start:end]):
                limit = policy.max_image_pieces if tag in _STRIP_TAGS else max(policy.max_image_pieces, 3 << 16)
                if values > limit and kind not in _PLAIN_TYPES:
                    raise pieces_error(policy)
                if tag == _SUBFILE_TAG:  # stored in the first bytes of the field
                    unused = struct.calcsize(pointer) - _SUBFILE_BYTES.get(kind, 4)
                    subfile = value >> 8 * unused if order == ">" else value
            if not number or not subfile & _REDUCED:
                pages.append(number)
            (start,) = struct.unpack_from(order + pointer, data, end)
    except struct.error:  # cut off: Pillow raises the error
        pass
    return pages


def pieces_error(policy: MediaPolicy) -> InputError:
    text = (
        f"it has more than {policy.max_image_pieces:,} strips or segments (media: max_image_pieces); save it again with fewer"
    )
    return InputError(text, code="over_limit", param="max_image_pieces", limit=policy.max_image_pieces)
