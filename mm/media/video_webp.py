"""Animated WebP as video, decoded with Pillow: FFmpeg's decoder of WebP knows still images only.

An animation is a canvas and a chunk for each frame, which says how long the frame is shown (WebP Container Specification).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from ...callers.errors import InputError
from .image import opened_image
from .image_pages import may_hold_pages
from .pixels import upright_rgb
from .policy import DecodeClock, MediaPolicy
from .video_pyav import DEFAULT_FPS, VideoIndex

_FIRST_CHUNK, _DURATION = 12, 12  # offsets in the file, and in the chunk of a frame
_MAX_FRAMES = 1 << 16


def is_animated_webp(data: bytes) -> bool:
    return data[8:12] == b"WEBP" and may_hold_pages(data)


def index_webp(data: bytes, policy: MediaPolicy) -> VideoIndex:
    """Index the frames of an animation from its chunks, without decoding them.

    Raises:
        InputError: the file is broken, its size is refused by the policy, or it has too many frames.
    """
    with opened_image(data, policy, load=False) as (image, _):
        width, height = image.size
    durations = [int.from_bytes(data[at + _DURATION : at + _DURATION + 3], "little") / 1000 for at in _frames(data)]
    times = tuple(accumulate(durations[:-1], initial=0.0))[: len(durations)]
    seconds = sum(durations)
    fps = len(durations) / seconds if seconds > 0 else DEFAULT_FPS
    if seconds <= 0:
        times = tuple(i / fps for i in range(len(durations)))
    packets = tuple((number, number == 0) for number in range(len(durations)))
    return VideoIndex(height, width, 1, times, fps, packets, None, 0.0, seconds > 0, 0)


def read_frames(
    data: bytes, index: VideoIndex, wanted: Container[int], clock: DecodeClock, policy: MediaPolicy
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield the requested frames: number, and RGB uint8 `[height, width, 3]`, on the policy's background."""
    with opened_image(data, policy) as (image, _):
        for number in range(index.total):
            clock.check()
            if number in wanted:
                image.seek(number)
                yield number, upright_rgb(image, 1, policy).numpy()


def _frames(data: bytes) -> Iterator[int]:
    """Yield where the contents of the chunks of frames begin."""
    at, count = _FIRST_CHUNK, 0
    for _ in range(2 * _MAX_FRAMES):
        if at + 8 > len(data):
            return
        if data[at : at + 4] == b"ANMF":
            count += 1
            if count > _MAX_FRAMES:
                raise InputError(
                    f"it has more than {_MAX_FRAMES:,} frames; cut it into shorter videos", code="over_limit", limit=_MAX_FRAMES
                )
            yield at + 8
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
