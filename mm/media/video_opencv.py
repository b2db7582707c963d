"""The frames asked for of an encoded clip, through OpenCV. Knows no sampling, no limits and no container."""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from ..errors import InputError
from .video_pyav import ClipIndex


def read_frames(data: bytes, index: ClipIndex, wanted: Container[int]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """`(number, uint8 [height, width, 3] RGB, upright)` of the wanted frames that can be decoded, as they come out.

    Decodes from the start, as OpenCV cannot seek by presentation stamp, and converts only what is wanted.
    """
    import cv2

    stream = _Stream(data)  # OpenCV keeps no reference to it, so it has to live as long as the capture
    capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])  # type: ignore[call-overload]
    try:
        if not capture.isOpened():
            raise InputError("it is not in a video format that OpenCV can read; choose the backend pyav")
        last = max((number for number in range(index.total) if number in wanted), default=-1)
        number = -1
        for _ in index.packets:
            if not capture.grab():
                number += index.numbers is None
                continue  # this packet is broken; the next may not be
            clock = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000  # 0 for the last frames of some containers
            number = number + 1 if index.numbers is None or (number >= 0 and clock <= 0) else _nearest(index, clock)
            if number > last:
                return
            if number in wanted:
                read, frame = capture.retrieve()
                if read:
                    yield number, cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    finally:
        capture.release()


class _Stream(io.BytesIO):
    """A broken file makes OpenCV seek to before the start; an exception from its stream would crash the process."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return super().seek(0, 2)


def _nearest(index: ClipIndex, seconds: float) -> int:
    """The frame that OpenCV's clock, which starts with the stream, means."""
    seconds -= index.late
    after = min(bisect_left(index.times, seconds), index.total - 1)
    return after - (after > 0 and seconds - index.times[after - 1] < index.times[after] - seconds)
