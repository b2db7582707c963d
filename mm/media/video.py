"""Decode a video in any accepted form to sampled RGB frames with their times."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...callers.errors import InputError
from ..geometry import FrameSampling, sample_indices, usable_range
from ..hashing import digest
from ..types import FramePlan, MediaHeader, VideoItem
from . import video_opencv, video_pyav, video_webp
from .policy import DecodeClock, MediaPolicy, check_size
from .video_frames import read_decoded_frames
from .video_pyav import VideoIndex, index_video

_log = logging.getLogger("sensorium")
_Reader = Callable[[bytes, VideoIndex, Container[int], DecodeClock], Iterator[tuple[int, np.ndarray[Any, Any]]]]

READERS: dict[str, _Reader] = {"pyav": video_pyav.read_frames, "opencv": video_opencv.read_frames}
"""`policy.video_backend` -> decoder of the requested frames. The index of a video always comes from PyAV's packets."""


def probe_video(value: object, sampling: FrameSampling, policy: MediaPolicy) -> MediaHeader:
    """Return the header of a video without decoding it: frame size, and which frames are used.

    Args:
        value: an encoded video (bytes-like); uint8 frames `[n, h, w, 3]` or `[n, 3, h, w]`; a list of images of one size; or
            `(frames, metadata)` with the fields of transformers' VideoMetadata and `do_sample_frames`.
        sampling: the frames to use. Frames without metadata are all used unless num_frames is given, and count as 24 per
            second. Frames whose metadata has `frames_indices` or `do_sample_frames=False` have been sampled already.
        policy: limits on pixels and bytes.

    Returns:
        Times count from the first frame. `exact` is False if the container has no usable timestamps, or does not start with
        a keyframe.

    Raises:
        InputError: another form, no frames, or a limit is exceeded.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        index = _index(bytes(value), policy)
        return _checked(index.height, index.width, _plan(index, sampling), index.exact, policy)
    video = read_decoded_frames(value, policy)
    return _checked(video.height, video.width, video.plan(sampling)[1], True, policy)


def decode_video(
    value: object, sampling: FrameSampling, policy: MediaPolicy, read_frame: Callable[[int], torch.Tensor] | None = None
) -> VideoItem:
    """Decode the used frames. Arguments are those of `probe_video`; `read_frame` is that of `DecodedFrames.pixels`.

    A file that is cut off gives a warning in the log. A frame that cannot be read, or has another size than the header, is
    left out with a warning, too, and listed in `plan.missing`. With `policy.frame_recovery` the next readable frame before the
    following sampled one replaces it and is listed in `plan.replaced`.

    Raises:
        InputError: as `probe_video`, no requested frame can be read, or decoding takes too long.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        video = read_decoded_frames(value, policy)
        used, plan = video.plan(sampling)
        _checked(video.height, video.width, plan, True, policy)
        return VideoItem(video.pixels(used, policy, read_frame), plan)
    data = bytes(value)
    index = _index(data, policy)
    plan = _plan(index, sampling)
    _checked(index.height, index.width, plan, index.exact, policy)
    rows, reader, clock = _SampledFrames(index, plan.indices), _reader(data, policy), DecodeClock(policy)
    rows.fill(reader(data, index, rows, clock))
    if policy.video_backend != "pyav" and all(number is None for number in rows.used):  # PyAV knows more formats
        reader = _reader(data, replace(policy, video_backend="pyav"))
        rows.fill(reader(data, index, rows, clock))
    if policy.frame_recovery and None in rows.used:
        rows.stand_ins = True
        rows.fill(reader(data, index, rows, clock))
    return rows.item(plan)


def hash_video(value: object, policy: MediaPolicy) -> str:
    """Return 64 hex digits of the source: encoded bytes, or frames with the rate and numbers of their metadata.

    Equal frames have the same hash in any form. An animated WebP is hashed with the background that it is decoded on.

    Raises:
        InputError: the value is not a video.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return digest("video", data, *((policy.background,) if video_webp.is_animated_webp(data) else ()))
    video = read_decoded_frames(value, policy)
    return digest(
        "frames", video.pixels(range(len(video.numbers)), policy), video.fps, video.total, video.numbers, video.sampled
    )


def _index(data: bytes, policy: MediaPolicy) -> VideoIndex:
    return video_webp.index_webp(data, policy) if video_webp.is_animated_webp(data) else index_video(data, policy)


def _reader(data: bytes, policy: MediaPolicy) -> _Reader:
    if video_webp.is_animated_webp(data):
        return partial(video_webp.read_frames, policy=policy)
    return READERS[policy.video_backend]


def _plan(index: VideoIndex, sampling: FrameSampling) -> FramePlan:
    if not index.total:
        raise InputError("it holds no frames; the file is broken or cut off")
    times = None if index.numbers is None else index.times
    chosen = sample_indices(index.total, index.fps, sampling, times)
    seconds = usable_range(index.total, index.fps, sampling, times)[1]
    rate = len(chosen) / seconds if seconds else index.fps
    return FramePlan(tuple(chosen), tuple(index.times[i] for i in chosen), index.total, rate)


def _checked(height: int, width: int, plan: FramePlan, exact: bool, policy: MediaPolicy) -> MediaHeader:
    check_size(height, width, policy)
    count = len(plan.indices)
    needed = count * height * width * 3
    if needed > policy.max_video_bytes:
        raise InputError(
            f"{count} frames are {needed:,} bytes, the limit is {policy.max_video_bytes:,}; lower num_frames or fps",
            code="over_limit",
            limit=policy.max_video_bytes,
            value=needed,
        )
    return MediaHeader("video", height, width, plan, exact=exact)


class _SampledFrames:
    """The frames of a plan, filled in as they are decoded. `number in frames` is True if that frame is still needed."""

    def __init__(self, index: VideoIndex, wanted: Sequence[int]) -> None:
        self.index, self.wanted = index, wanted
        self.used: list[int | None] = [None] * len(wanted)
        self.pixels = torch.empty((len(wanted), index.height, index.width, 3), dtype=torch.uint8)
        self.stand_ins = False  # a frame may replace the sampled frame before it
        self.other_size: tuple[int, ...] | None = None

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self._row(number) is not None

    def fill(self, frames: Iterable[tuple[int, np.ndarray[Any, Any]]]) -> None:
        for number, frame in frames:
            row = self._row(number)
            if frame.shape != self.pixels.shape[1:]:
                self.other_size = frame.shape
            elif row is not None:
                self.pixels[row] = torch.from_numpy(np.ascontiguousarray(frame))
                self.used[row] = number

    def item(self, plan: FramePlan) -> VideoItem:
        pairs = [
            (row, wanted, used)
            for row, (wanted, used) in enumerate(zip(self.wanted, self.used, strict=True))
            if used is not None
        ]
        if not pairs:
            if self.other_size is None:
                raise InputError("no frame can be decoded; the file is broken or cut off")
            height, width = self.other_size[:2]
            size = f"{self.index.width}x{self.index.height}"
            raise InputError(f"its header says {size} but its frames are {width}x{height}; the file is broken")
        rows, wanted, taken = zip(*pairs, strict=True)
        if len(self.index.packets) < self.index.stated:
            _log.warning("video: the file is cut off; it has %d of its %d frames", len(self.index.packets), self.index.stated)
        if len(rows) < len(self.wanted):
            _log.warning("video: %d of the %d sampled frames could be read", len(rows), len(self.wanted))
        plan = replace(
            plan,
            indices=taken,
            timestamps=tuple(self.index.times[i] for i in taken),
            replaced=tuple((a, b) for a, b in zip(wanted, taken, strict=True) if a != b),
            missing=tuple(i for i, used in zip(self.wanted, self.used, strict=True) if used is None),
        )
        return VideoItem(self.pixels if len(rows) == len(self.wanted) else self.pixels[list(rows)], plan)

    def _row(self, number: int) -> int | None:
        row = bisect_right(self.wanted, number) - 1
        if row < 0 or number >= self.index.total or self.used[row] is not None:
            return None
        return row if self.stand_ins or self.wanted[row] == number else None
