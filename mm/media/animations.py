"""Animations whose frames are used as pages. A frame builds on those before it, so the opened file is kept for the next one."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image

from .image_pages import is_heif, is_tiff, may_hold_pages
from .policy import MediaPolicy

_MOST = 4  # animations that are kept
_MOST_BYTES = 384 << 20  # of their files and frames; less than `isolate.LEAK`
_PIXEL_BYTES = 12  # of a decoder: the frame, the one before it, and what Pillow makes of it
_GIF_HEADER, _GIF_EXTENSION, _GIF_FRAME, _GIF_END = 13, 0x21, 0x2C, 0x3B


@dataclass(frozen=True, eq=False)
class Animation:
    """An opened file. `sizes`: width and height of each frame as it is decoded. `orientation`: EXIF orientation of all."""

    data: bytes
    policy: MediaPolicy
    image: Image.Image
    sizes: list[tuple[int, int]]
    orientation: int

    @property
    def held(self) -> int:
        """Bytes that it holds, about."""
        width, height = self.sizes[-1]
        return len(self.data) + _PIXEL_BYTES * width * height


class _Kept(threading.local):
    def __init__(self) -> None:
        self.animations: list[Animation] = []


_kept = _Kept()


def is_animation(data: bytes) -> bool:
    """Return whether a file is a GIF, or an APNG, WebP or AVIF that says that it is animated."""
    return may_hold_pages(data) and not is_tiff(data) and not is_heif(data)


@contextmanager
def opened_animation(
    data: bytes, policy: MediaPolicy, page: int | None, open_first: Callable[[], tuple[Image.Image, int]]
) -> Iterator[Animation]:
    """Yield an animation. If this thread has opened it before and not gone beyond `page`, it goes on from there.

    Args:
        page: the frame, from 1, to which the caller goes; None: none.
        open_first: opens the file at its first frame; returns the image and its orientation.
    """
    animation = next((kept for kept in _kept.animations if kept.policy == policy and kept.data == data), None)
    if animation is not None:
        _kept.animations.remove(animation)
        if page is not None and animation.image.tell() >= page:
            animation.image.close()
            animation = None
    if animation is None:
        image, orientation = open_first()
        animation = Animation(data, policy, image, _sizes(data, image, open_first), orientation)
    try:
        yield animation
    except BaseException:  # the decoder may be in any state
        animation.image.close()
        raise
    _kept.animations.append(animation)
    while len(_kept.animations) > _MOST or sum(kept.held for kept in _kept.animations) > _MOST_BYTES:
        _kept.animations.pop(0).image.close()


def _sizes(data: bytes, image: Image.Image, open_first: Callable[[], tuple[Image.Image, int]]) -> list[tuple[int, int]]:
    count: int = getattr(image, "n_frames", 1)
    if image.format != "GIF":
        return [image.size] * count
    sizes = gif_sizes(data)
    if len(sizes) == count:
        return sizes
    sizes = []
    with open_first()[0] as broken:  # only decoding it tells
        for number in range(count):
            broken.seek(number)
            sizes.append(broken.size)
    return sizes


def gif_sizes(data: bytes) -> list[tuple[int, int]]:
    """Return width and height at each frame of a GIF. A frame beyond the screen enlarges it from there on, as in Pillow."""
    sizes: list[tuple[int, int]] = []
    try:
        width, height, flags = struct.unpack_from("<HHB", data, 6)
        at = _GIF_HEADER + _palette_bytes(flags)
        while data[at] != _GIF_END:
            kind = data[at]
            if kind == _GIF_FRAME:
                left, top, columns, rows, flags = struct.unpack_from("<4HB", data, at + 1)
                width, height = max(width, left + columns), max(height, top + rows)
                sizes.append((width, height))
                at += 11 + _palette_bytes(flags)
            at += 2 if kind == _GIF_EXTENSION else 0
            if kind not in (_GIF_FRAME, _GIF_EXTENSION):  # padding
                at += 1
                continue
            while data[at]:
                at += 1 + data[at]
            at += 1
    except (IndexError, struct.error):  # cut off
        pass
    return sizes


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
