"""One clip in any form a caller may give, as sampled RGB frames with their times. Knows no family and no network."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import InputError, MediaError
from ..geometry import SamplingPolicy, sample_indices
from ..hashing import digest
from ..types import VideoItem
from .image import decode_image, read_bytes, to_hwc

DEFAULT_FPS = 24.0  # frames per second assumed where a clip does not say
MAX_BYTES = 4 << 30  # of decoded frames
_log = logging.getLogger("sensorium")


def load_video(value: object, index: int, sampling: Mapping[str, Any], max_bytes: int = MAX_BYTES) -> VideoItem:
    """A VideoItem from a file (bytes, data: URL, path), frames, or `(frames, metadata)`.

    Frames are a uint8 array or tensor `[n, h, w, 3]` (or channels second) or a list of pictures of one size. A file,
    and frames whose metadata gives `fps`, are sampled by `sampling` (arguments of SamplingPolicy); with
    `frames_indices` in the metadata they already are. Bare frames are all used, unless num_frames is given, and
    count as 24 per second. A damaged file gives the frames before the damage, with a warning in the log.

    Raises:
        MediaError: anything else, a clip without a readable frame, more frames wanted than there are, or more
            than `max_bytes` of pixels.
    """
    try:
        policy = SamplingPolicy(**sampling)
        if isinstance(value, bytes | bytearray | memoryview | str | os.PathLike):
            frames, times, fps = _from_file(read_bytes(value, "video"), policy, max_bytes)
        else:
            frames, times, fps = _from_frames(value, policy)
    except MediaError as error:
        raise MediaError("video", index, error.reason) from None
    except InputError as error:
        raise MediaError("video", index, str(error)) from None
    except (TypeError, ValueError, OSError) as error:  # metadata of another type, a closed or hostile picture
        raise MediaError("video", index, f"it cannot be read ({error})") from None
    return VideoItem(frames, times, fps, digest("video", frames, times, fps))


def _from_frames(value: object, policy: SamplingPolicy) -> tuple[Tensor, tuple[float, ...], float]:
    metadata: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    frames = _stack(value)
    count, source_fps = frames.shape[0], float(metadata.get("fps") or DEFAULT_FPS)
    known = metadata.get("frames_indices")
    if known is not None:
        return frames, *_timing([int(i) for i in known], int(metadata.get("total_num_frames") or count), source_fps, count)
    if not metadata.get("fps") and policy.num_frames is None:
        return frames, *_timing(list(range(count)), count, source_fps, count)
    chosen = sample_indices(count, source_fps, policy)
    picked = frames if len(chosen) == count else frames[chosen]
    return picked, *_timing(chosen, count, source_fps, len(chosen))


def _timing(indices: Sequence[int], total: int, fps: float, count: int) -> tuple[tuple[float, ...], float]:
    """`(seconds per frame used, frames used per second of source)`."""
    if len(indices) != count:
        raise MediaError("video", 0, f"frames_indices names {len(indices)} frames but {count} were given")
    return tuple(i / fps for i in indices), len(indices) / total * fps


def _stack(value: object) -> Tensor:
    if isinstance(value, np.ndarray | Tensor):
        if value.ndim != 4:
            raise MediaError("video", 0, f"frames have 4 axes [n, h, w, 3], not {value.ndim}")
        frames = to_hwc(value, "video")
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        if not all(isinstance(v, np.ndarray | Tensor | Image.Image) for v in value):
            raise MediaError("video", 0, "a list of frames holds pictures (PIL or arrays) only")
        frames_list = [decode_image(frame)[1] for frame in value]
        if any(frame.shape != frames_list[0].shape for frame in frames_list):
            raise MediaError("video", 0, "the frames of one clip have one size")
        frames = torch.stack(frames_list)
    else:
        raise MediaError("video", 0, f"a {type(value).__name__} is not a known form; give a file, an array or a list of frames")
    if frames.shape[-1] != 3:
        raise MediaError("video", 0, f"frames are RGB, not of {frames.shape[-1]} channels")
    return frames


def _from_file(data: bytes, policy: SamplingPolicy, max_bytes: int) -> tuple[Tensor, tuple[float, ...], float]:
    total, fps, size = _probe(data)
    wanted = sample_indices(total, fps, policy)
    needed = len(wanted) * size[0] * size[1] * 3
    if needed > max_bytes:
        raise MediaError("video", 0, f"{len(wanted)} frames are {needed:,} bytes, the limit is {max_bytes:,}; lower fps")
    frames, times = _read(data, wanted, fps)
    if not frames:
        raise MediaError("video", 0, "no frame can be decoded; the file is broken or cut off")
    if len(frames) < len(wanted):
        _log.warning("video: %d of the %d frames wanted could be read", len(frames), len(wanted))
    return torch.from_numpy(np.stack(frames)), tuple(times), len(wanted) / total * fps


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    import cv2

    stream = io.BytesIO(data)  # OpenCV keeps no reference to it, so it has to live as long as the capture
    capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [])  # type: ignore[call-overload]
    try:
        if not capture.isOpened():
            raise MediaError("video", 0, "it is not in a video format that can be read")
        yield capture
    finally:
        capture.release()


def _probe(data: bytes) -> tuple[int, float, tuple[int, int]]:
    """`(frames, frames per second, (height, width))`; frames are counted where the header does not say."""
    import cv2

    with _opened(data) as capture:
        total, fps = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), float(capture.get(cv2.CAP_PROP_FPS))
        size = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT)), int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
        if total <= 0:
            total = 0
            while capture.grab():
                total += 1
    return total, fps if fps > 0 else DEFAULT_FPS, size


def _read(data: bytes, wanted: Sequence[int], fps: float) -> tuple[list[np.ndarray[Any, Any]], list[float]]:
    """Decode through and convert only the wanted frames; stops where the file stops."""
    import cv2

    frames, times, targets = [], [], set(wanted)
    with _opened(data) as capture:
        for position in range(max(wanted) + 1):
            if not capture.grab():
                break
            if position not in targets:
                continue
            seconds = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
            read, frame = capture.retrieve()
            if read:
                frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
                times.append(seconds if seconds > 0 else position / fps)
    return frames, times
