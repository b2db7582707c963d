"""Decode requested frames of an encoded video with OpenCV."""

from __future__ import annotations

import io
import os
import threading
from bisect import bisect_left
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .container import open_options
from .orientation import upright
from .policy import DecodeClock, MediaPolicy
from .video_pyav import FORMATS, VideoIndex

_VARIABLE = "OPENCV_FFMPEG_CAPTURE_OPTIONS"  # the only way to give FFmpeg options; OpenCV reads it when it opens a file
_OPENING = threading.Lock()


def read_frames(
    data: bytes, index: VideoIndex, wanted: Container[int], clock: DecodeClock
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield the requested frames that can be decoded, in decoding order: number, and upright RGB uint8 `[height, width, 3]`.

    Decodes from the start, because OpenCV cannot seek by timestamp, and converts only requested frames. A format that OpenCV
    cannot open gives none.
    """
    import cv2

    stream = _Stream(data)  # must live as long as the capture, which keeps no reference to it
    with _options():
        capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])  # type: ignore[call-overload]
    try:
        if not capture.isOpened():
            return
        capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)  # OpenCV turns frames, but does not flip them
        last = max((number for number in range(index.total) if number in wanted), default=-1)
        number = -1
        for _ in index.packets:
            clock.check()
            if not capture.grab():
                number += index.numbers is None
                continue  # a broken packet; the next one may be good
            shown = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000  # 0 for the last frames of some containers
            number = number + 1 if index.numbers is None or (number >= 0 and shown <= 0) else _nearest(index, shown)
            if number > last:
                return
            if number in wanted:
                read, frame = capture.retrieve()
                if read:
                    yield number, upright(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), index.orientation)
    finally:
        capture.release()


@contextmanager
def _options() -> Iterator[None]:
    """Restrict what OpenCV's FFmpeg opens, with the lists that PyAV's gets. The caller's own options are kept for its files."""
    pairs = open_options(FORMATS, MediaPolicy()).items()
    with _OPENING:
        variable = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = "|".join(f"{name};{value}" for name, value in pairs)
        try:
            yield
        finally:
            if variable is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = variable


class _Stream(io.BytesIO):
    """A file that allows seeks before its start, which broken videos cause. An exception here would crash the process."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return super().seek(0, 2)


def _nearest(index: VideoIndex, seconds: float) -> int:
    """Return the number of the frame nearest to a time of OpenCV's clock, which counts from the start of the stream."""
    seconds -= index.first_frame_delay
    after = min(bisect_left(index.times, seconds), index.total - 1)
    return after - (after > 0 and seconds - index.times[after - 1] < index.times[after] - seconds)
