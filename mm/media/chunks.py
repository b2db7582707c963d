"""Vision chunks: an ordered stream of images and timed chunks of videos. Entries are parsed and videos cut here."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from numbers import Real

import numpy as np
from torch import Tensor

from ...callers.errors import InputError, hint, typed
from ..types import FramePlan, ImageItem, Media, MediaHeader, MediaItem, VideoItem, VisionChunk
from .policy import DecodeSpec

DEFAULT_CHUNK_FPS = 24.0  # frame rate of a chunk without metadata
_PIXELS = ("min_pixels", "max_pixels", "detail")
_FRAMES = ("fps", "num_frames", "video_start", "video_end")
_KEYS = {
    "image": ("image", "uuid", *_PIXELS),
    "video": ("video", "uuid", *_PIXELS, *_FRAMES),
    "video_chunk": ("video_chunk", "uuid", *_PIXELS, "prompt", "video_idx"),
}
_TIME = re.compile(r"\s*(\d{1,2}):([0-5]\d):([0-5]\d)\.(\d{3})(?:<\|\w+\|>|video)*\s*")
_NUMBERS_PER_SECOND = 2000  # frames of a chunk with a start time are numbered in half milliseconds


def read_entry(entry: object) -> tuple[str, Media]:
    """Return `(kind, media)` of an entry of the stream.

    "image" is an image. "video" is a whole video, which is sampled and cut into chunks here. "video_chunk" is a chunk that the
    caller cut; its data is `(frames, metadata)` with `fps` and `do_sample_frames=False`, so that it is not sampled again.

    An entry is an image in any form, a `Media` with one, or a mapping with a `type`: `{"type": "image", "image": ...}`,
    `{"type": "video", "video": ...}`, `{"type": "video_chunk", "video_chunk": frames or (frames, metadata)}`, each with
    `uuid` and the applicable options of `Media`. A chunk may give its time in the video by a `prompt` that starts with it,
    "00:01:02.500"; `frames_indices` of the metadata take precedence. `video_idx`, which groups chunks in other libraries,
    is ignored.

    Raises:
        InputError: a type or key is unknown (the message names the nearest), a chunk has no frames, or its prompt has no time.
    """
    if isinstance(entry, Media):
        if isinstance(entry.data, Media):
            raise InputError("a Media holds data, not another Media")
        kind, inner = read_entry(entry.data)
        outer = {f.name: getattr(entry, f.name) for f in fields(Media) if f.name != "data"}
        return kind, replace(inner, **{name: value for name, value in outer.items() if value is not None})
    if not isinstance(entry, Mapping):
        return "image", Media(entry)
    kind = _kind(entry)
    uuid = entry.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and uuid):
        raise InputError("uuid must be a non-empty string")
    data = entry.get(kind)
    if kind == "video_chunk" and data is not None:
        data = _read_video_chunk(data, entry.get("prompt"))
    options = {name: entry[name] for name in (*_PIXELS, *_FRAMES) if entry.get(name) is not None}
    return kind, Media(data, uuid, **options)


def split(item: MediaItem, kind: str, spec: DecodeSpec) -> list[VisionChunk]:
    """Return the chunks of a decoded entry of `kind`: one for an image or chunk, any number for a video.

    Raises:
        InputError: a chunk has too many frames.
    """
    if isinstance(item, ImageItem):
        return [image_chunk(item)]
    assert isinstance(item, VideoItem)
    _check_num_frames(kind, len(item.plan.indices), spec)
    return split_video(item, spec.frames_per_chunk)


def split_header(header: MediaHeader, kind: str, spec: DecodeSpec) -> list[MediaHeader]:
    """Return the headers of the chunks that `split` makes of the item with this header.

    Raises:
        InputError: as `split`.
    """
    if header.frames is None:
        return [replace(header, modality="vision_chunk")]
    _check_num_frames(kind, len(header.frames.indices), spec)
    return [
        replace(header, modality="vision_chunk", frames=plan) for _, plan in _split_plan(header.frames, spec.frames_per_chunk)
    ]


def image_chunk(item: ImageItem) -> VisionChunk:
    """Return an image as a chunk without a time."""
    return VisionChunk(item.pixels[None])


def split_video(item: VideoItem, frames_per_chunk: int) -> list[VisionChunk]:
    """Cut a video into chunks of `frames_per_chunk` frames (views); the last may be shorter."""
    return [VisionChunk(item.frames[taken], plan) for taken, plan in _split_plan(item.plan, frames_per_chunk)]


def _split_plan(plan: FramePlan, frames_per_chunk: int) -> Iterator[tuple[slice, FramePlan]]:
    """Split the plan. Each used, replaced or missing frame is in exactly one chunk; times are those of the whole video."""
    firsts = plan.indices[::frames_per_chunk]
    replaced: list[list[tuple[int, int]]] = [[] for _ in firsts]
    missing: list[list[int]] = [[] for _ in firsts]
    for pair in plan.replaced:
        replaced[max(0, bisect_right(firsts, pair[1]) - 1)].append(pair)
    for index in plan.missing:
        missing[max(0, bisect_right(firsts, index) - 1)].append(index)
    for number, (stand_ins, gaps) in enumerate(zip(replaced, missing, strict=True)):
        taken = slice(number * frames_per_chunk, (number + 1) * frames_per_chunk)
        part = FramePlan(plan.indices[taken], plan.timestamps[taken], plan.total, plan.fps, tuple(stand_ins), tuple(gaps))
        yield taken, part


def _check_num_frames(kind: str, frames: int, spec: DecodeSpec) -> None:
    if kind == "video_chunk" and frames > spec.frames_per_chunk:
        most = spec.frames_per_chunk
        raise InputError(
            f"a video_chunk of {frames} frames is over the limit of {most}; cut it, or give it as type video",
            code="over_limit",
            limit=most,
            value=frames,
        )


def _kind(entry: Mapping[object, object]) -> str:
    kind = entry.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise InputError(
            f"an entry of vision_chunk has the unknown type {kind!r}; {hint(kind, _KEYS)}", code="unknown_name", value=kind
        )
    for key in entry:
        if key != "type" and key not in _KEYS[kind]:
            raise InputError(
                f"unknown key {key!r} of an entry of type {kind}; {hint(key, _KEYS[kind])}", code="unknown_name", value=key
            )
    return kind


def _read_video_chunk(data: object, prompt: object) -> tuple[object, dict[str, object]]:
    """Return the frames of a chunk, and metadata with their numbers in the video and the rate of these numbers."""
    frames, metadata = _with_metadata(data)
    if not isinstance(frames, list | tuple | np.ndarray | Tensor):
        raise InputError(f"a video_chunk must be frames, not {typed(frames)}; give a file as type video")
    count = len(frames) if isinstance(frames, list | tuple) or frames.ndim else 0
    if not count:
        raise InputError("a video_chunk holds no frames")
    first = None if prompt is None else _start(prompt)
    fps = metadata.get("fps") or DEFAULT_CHUNK_FPS
    if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < float(fps) < 1e6:
        raise InputError(f"the fps of a video_chunk is {str(fps)[:100]}; give a positive number")
    chosen: dict[str, object] = {**metadata, "fps": float(fps), "do_sample_frames": False}
    if first is not None and metadata.get("frames_indices") is None:
        numbers = [first + round(frame * _NUMBERS_PER_SECOND / float(fps)) for frame in range(count + 1)]
        chosen |= {"fps": float(_NUMBERS_PER_SECOND), "frames_indices": numbers[:-1], "total_num_frames": numbers[-1]}
    return frames, chosen


def _with_metadata(data: object) -> tuple[object, Mapping[str, object]]:
    if not isinstance(data, tuple) or len(data) != 2:
        return data, {}
    frames, metadata = data
    if isinstance(metadata, Mapping):
        return frames, metadata
    if hasattr(metadata, "fps"):
        return frames, {name: getattr(metadata, name, None) for name in ("fps", "frames_indices", "total_num_frames")}
    return data, {}


def _start(prompt: object) -> int:
    """Return the frame number of the time in a prompt.

    The text is truncated to milliseconds. The middle of that millisecond is the best guess and gives the same text again.
    """
    match = _TIME.fullmatch(prompt) if isinstance(prompt, str) else None
    if match is None:
        raise InputError(
            "the prompt of a video_chunk must be its start time, such as 00:01:02.500, with or without the model's marks"
        )
    hours, minutes, seconds, thousandths = (int(part) for part in match.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * _NUMBERS_PER_SECOND + thousandths * 2 + 1
