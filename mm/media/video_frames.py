"""Videos given as decoded frames: arrays, lists of images, and their metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...callers.errors import InputError, hint, typed
from ..geometry import FrameSampling, sample_indices, usable_range
from ..types import FramePlan
from .image import decode_image, probe_image
from .pixels import to_hwc
from .policy import DecodeClock, MediaPolicy
from .video_pyav import DEFAULT_FPS

_FIELDS = ("total_num_frames", "fps", "width", "height", "duration", "video_backend", "frames_indices", "do_sample_frames")
_AUDIO = "audio"
_MAX_NUMBER = 1e9


@dataclass(frozen=True)
class DecodedFrames:
    """Frames that the caller has decoded.

    Args:
        frames: uint8 `[n, height, width, 3]`, or images of one size.
        fps: rate of the source; None if unknown.
        total: frames of the source. numbers: numbers of the given frames in the source, in order of time.
        sampled: the caller has sampled them already.
    """

    frames: Tensor | Sequence[object]
    height: int
    width: int
    fps: float | None
    total: int
    numbers: tuple[int, ...]
    sampled: bool

    def plan(self, sampling: FrameSampling) -> tuple[list[int], FramePlan]:
        """Return positions of the used frames among the given ones, and the plan in numbers of the source."""
        count, rate = len(self.numbers), self.fps or DEFAULT_FPS
        usable, duration = usable_range(self.total, self.fps, replace(sampling, max_duration=None))
        used, seconds = [i for i, number in enumerate(self.numbers) if number in usable], duration or self.total / rate
        if not used:
            start, end = usable.start / rate, usable.stop / rate
            raise InputError(f"none of its {count} frames lies from {start:g} to {end:g} s; change video_start or video_end")
        if not self.sampled and (self.fps or sampling.num_frames is not None):
            if not self.fps:
                sampling = replace(sampling, max_duration=None)
            stored_fps = rate * (count / self.total)
            used = sample_indices(count, stored_fps, sampling)
            seconds = usable_range(count, stored_fps, sampling)[1] or seconds
        indices = tuple(self.numbers[i] for i in used)
        return used, FramePlan(indices, tuple(i / rate for i in indices), self.total, len(used) / seconds)

    def pixels(
        self, positions: Sequence[int], policy: MediaPolicy, read_frame: Callable[[int], Tensor] | None = None
    ) -> Tensor:
        """Return the frames at some positions, uint8 `[n, height, width, 3]`. Images are decoded one by one into the result.

        `read_frame`: decodes the image at a position; None: `decode_image`.
        """
        frames = self.frames
        if isinstance(frames, Tensor):
            return frames if len(positions) == len(frames) else frames[list(positions)]
        clock, size = DecodeClock(policy), (self.height, self.width, 3)
        pixels = torch.empty((len(positions), *size), dtype=torch.uint8)
        for row, position in zip(pixels, positions, strict=True):
            frame = decode_image(frames[position], policy) if read_frame is None else read_frame(position)
            if frame.shape != size:
                raise InputError(f"frame {position} is broken: its header and its pixels differ in size")
            row.copy_(frame)
            clock.check()
        return pixels


def read_decoded_frames(value: Any, policy: MediaPolicy) -> DecodedFrames:
    """Read a 4-D uint8 array or tensor, a list of images of one size, or `(either, metadata)`.

    Raises:
        InputError: another form, or metadata that is unknown or contradicts the frames.
    """
    metadata: Mapping[str, object] = {}
    if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], np.ndarray | Tensor | Image.Image):
        value, metadata = value[0], _fields(value[1])
    if isinstance(value, np.ndarray | Tensor):
        frames = _array(value)
        return _decoded_frames(frames, (frames.shape[1], frames.shape[2]), metadata)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        return _decoded_frames(value, _common_size(value, policy), metadata)
    raise InputError(f"a value of type {type(value).__name__} is not a known form; give a file, an array or a list of frames")


def attached_audio(value: object) -> object | None:
    """Return the `audio` of the metadata of frames: samples or `(samples, their rate)`; None if there is none."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)):
        return None
    return value[1].get(_AUDIO)


def _array(value: np.ndarray[Any, Any] | Tensor) -> Tensor:
    if value.ndim != 4:
        raise InputError(f"frames must have 4 axes [n, h, w, 3], not {value.ndim}")
    frames = to_hwc(value)
    if frames.shape[-1] == 4:
        raise InputError("frames have 4 channels; convert them to RGB")
    return frames.expand(-1, -1, -1, 3)


def _common_size(frames: Sequence[object], policy: MediaPolicy) -> tuple[int, int]:
    if not all(isinstance(frame, np.ndarray | Tensor | Image.Image) for frame in frames):
        raise InputError("a list of frames must hold only images (PIL or arrays)")
    sizes = {probe_image(frame, policy).size for frame in frames}
    if len(sizes) > 1:
        raise InputError("the frames of one video have different sizes; resize them to one size")
    return sizes.pop()


def _fields(metadata: object) -> Mapping[str, object]:
    """Return the known fields of a mapping, or of an object with them as attributes. None has no fields."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        if not (hasattr(metadata, "fps") and hasattr(metadata, "total_num_frames")):
            raise InputError(f"metadata of frames must be a mapping or an object with fps, not {typed(metadata)}")
        return {name: getattr(metadata, name, None) for name in _FIELDS}
    for name in metadata:
        if name not in (*_FIELDS, _AUDIO):
            raise InputError(
                f"unknown key {str(name)[:100]!r} in metadata of frames; {hint(name, (*_FIELDS, _AUDIO))}",
                code="unknown_name",
                value=name,
            )
    return {name: metadata[name] for name in metadata}


def _decoded_frames(frames: Tensor | Sequence[object], size: tuple[int, int], metadata: Mapping[str, object]) -> DecodedFrames:
    count, indices, do_sample = len(frames), metadata.get("frames_indices"), metadata.get("do_sample_frames")
    numbers = tuple(range(count)) if indices is None else _numbers(indices, count)
    total = _number(metadata, "total_num_frames")
    if total is None:
        total = max(count, numbers[-1] + 1)
    elif total != int(total) or numbers[-1] >= total:
        raise InputError(f"frames_indices holds {numbers[-1]}, but total_num_frames is {total:g}; correct the metadata")
    elif indices is None and total != count:
        raise InputError(f"total_num_frames is {total:g} but {count} frames were given; give frames_indices too")
    fps, seconds = _number(metadata, "fps"), _number(metadata, "duration")
    if not fps and seconds:
        fps = total / seconds
    sampled = indices is not None if do_sample is None else not do_sample
    height, width = size
    return DecodedFrames(frames, height, width, fps=fps or None, total=int(total), numbers=numbers, sampled=sampled)


def _numbers(indices: object, count: int) -> tuple[int, ...]:
    entries = indices.tolist() if isinstance(indices, np.ndarray | Tensor) else indices
    if not isinstance(entries, Sequence) or not all(isinstance(i, Integral) for i in entries):
        raise InputError("frames_indices must be a list of whole numbers")
    numbers = tuple(int(i) for i in entries)
    if len(numbers) != count:
        raise InputError(f"frames_indices names {len(numbers)} frames but {count} were given")
    if numbers[-1] > _MAX_NUMBER:
        raise InputError(f"frames_indices must be at most {_MAX_NUMBER:g}")
    if numbers[0] < 0 or any(a > b for a, b in pairwise(numbers)):
        raise InputError("frames_indices must be in order of time, from 0 on")
    return numbers


def _number(metadata: Mapping[str, object], name: str) -> float | None:
    value = metadata.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, int | float | np.integer | np.floating)
        or isinstance(value, bool)
        or not 0 <= value <= _MAX_NUMBER
    ):
        raise InputError(f"{name} of the metadata is {str(value)[:100]!r}; give a number from 0 to {_MAX_NUMBER:g}")
    return float(value) if value * _MAX_NUMBER >= 1 else 0.0  # so that neither it nor its inverse is infinite
