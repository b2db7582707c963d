"""Sizes of resized images, and frame sampling of videos: pure functions."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..callers.errors import ConfigError, InputError
from .types import ItemGeometry

_BOTH_ENDS = ("ends", "last", "nearest")
MAX_ITEM_ROWS = 1 << 22  # rows of one item: more than any context holds


def video_pruning_rate(config: Mapping[str, Any]) -> float:
    """Return the share of a video's rows that are dropped because they repeat those of the frame before, by default 0.

    Raises:
        ConfigError: `video_pruning_rate` of config.json is not a number from 0 to below 1.
    """
    rate = config.get("video_pruning_rate") or 0.0
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ConfigError(f"video_pruning_rate in config.json is {repr(rate)[:60]}; it must be at least 0 and below 1")
    return float(rate)


def retained_rows(each: int, frames: int, rate: float) -> int:
    """Return how many rows of a video remain after pruning: at least those of one frame, which has `each` rows."""
    return max(each, int(each * frames * (1 - rate)))


def pixel_shuffle_side(config: Mapping[str, Any]) -> int:
    """Return how many patches along each side make one row: 1 / `downsample_ratio` of config.json, by default 2.

    Raises:
        ConfigError: the ratio is not 1, 1/2, 1/3 and so on, up to rounding of its digits.
    """
    ratio = config.get("downsample_ratio", 0.5)
    fits = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 1e-6 < ratio <= 1
    if not fits or abs(round(1 / ratio) * ratio - 1) > 0.02:
        raise ConfigError(
            f"downsample_ratio in config.json is {repr(ratio)[:60]}; it must be 1 over a whole number, such as 0.5"
        )
    side: int = round(1 / ratio)
    return side


@dataclass(frozen=True)
class ResizePolicy:
    """Constraints of `smart_resize`.

    Args:
        factor: both sides become multiples of this.
        min_pixels, max_pixels: bounds of the area; if `frames` is above 1, of the area of all frames together.
        max_ratio: the longer side may be at most this many times the shorter one.
        frames: number of frames of a video.
        scale_short_sides: scale images and frames with a side below `factor` up to it first, both sides rounded down.
        counted: `frames` in whole temporal patches. The area is compared with the bounds for `counted` frames, but scaled
            to them for `frames`, as in the published code.
        enlarge: enlarge images with a side below `factor` to it first.
        squeeze: enlarge as well, and cut the longer side of other images to `max_ratio` times the shorter one.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    max_ratio: int = 200
    frames: int = 1
    counted: int = 1
    enlarge: bool = False
    squeeze: bool = False
    scale_short_sides: bool = False


@dataclass(frozen=True)
class FrameSampling:
    """Rule that selects the frames of a video.

    Args:
        fps: frames per second of source; excludes `num_frames`.
        num_frames: largest number of frames; -1 means all. A shorter video is used whole. If neither is given, all frames up to
            `max_frames`.
        min_frames, max_frames: bounds of the number of frames that `fps` gives.
        start, end: seconds of the source between which frames are used, both included; `end` None: up to its end.
        max_duration: seconds that are used, from `start`; None: all.
        multiple: the number of frames is rounded to a multiple of this (frames per temporal patch).
        spread: "stride" takes the first frame of equal segments, "middle" their middle frame. "ends" includes the first and the
            last frame; "nearest" does too, but rounds the frames in between where "ends" floors them. "after" takes the
            first frame at or after each time step, `fps` steps a second, each frame once. "before" takes the last frame at or
            before each of them; beyond `max_frames` steps, frames spread over steps of 0.1 s. "last" takes the frame nearest to
            each of them, and the last frame; beyond `max_frames`, it is "ends".
        nearest: round the number of frames that `fps` gives to the nearest multiple; False: floor it.
        margin: seconds skipped at both ends if more than `max_frames * fps` seconds remain. With "ends" only.
        fps_by_duration: `(seconds, fps)`, shortest first: videos of at most this many seconds use this rate instead of `fps`.
        frames_by_duration: `(seconds, frames)`, shortest first: shorter videos use at most this many frames instead of
            `max_frames`.
    """

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 1
    max_frames: int = 1 << 30
    start: float = 0.0
    end: float | None = None
    max_duration: float | None = None
    multiple: int = 1
    spread: str = "stride"
    nearest: bool = False
    margin: float = 0.0
    fps_by_duration: tuple[tuple[float, float], ...] = ()
    frames_by_duration: tuple[tuple[float, int], ...] = ()


def smart_resize(height: int, width: int, policy: ResizePolicy) -> tuple[int, int]:
    """Return `(height, width)`, both divisible by the factor, close to the source's aspect ratio and with an area in range.

    Rounding is half to even (42 -> 56 and 70 -> 56 with factor 28). No side is below the factor, so very long images may
    exceed `max_pixels`. Rule: published preprocessing of Qwen2-VL; for videos that of Qwen3-VL.

    Raises:
        InputError: the image is empty, or its sides differ by more than `max_ratio`.
    """
    if min(height, width) < 1:
        raise InputError(f"an image of {width}x{height} has no pixels")
    factor, least, most = policy.factor, policy.min_pixels, policy.max_pixels
    if policy.scale_short_sides and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if policy.enlarge and height < factor:
        height, width = factor, round(width * factor / height)
    if policy.enlarge and width < factor:
        height, width = round(height * factor / width), factor
    if policy.squeeze:
        height, width = _squeezed(height, width, policy)
    elif max(height, width) / min(height, width) > policy.max_ratio:
        raise InputError(
            f"its sides {width}x{height} differ by more than {policy.max_ratio}:1; crop it first",
            code="over_limit",
            limit=policy.max_ratio,
        )
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if policy.counted * tall * wide > most:
        shrink = math.sqrt(policy.frames * height * width / most)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif policy.counted * tall * wide < least:
        grow = math.sqrt(least / (policy.frames * height * width))
        tall, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return tall, wide


def _squeezed(height: int, width: int, policy: ResizePolicy) -> tuple[int, int]:
    """Enlarge a shorter side below the factor to it, or cut the longer side. Rule: Ovis2.5, with its order of operations."""
    factor, ratio = policy.factor, policy.max_ratio
    if min(height, width) < factor:
        if height < width:
            return factor, round(factor / height * width)
        return round(factor / width * height), factor
    return min(height, ratio * width), min(width, ratio * height)


def patch_grid(
    size: tuple[int, int], policy: ResizePolicy, merge: int, frames: int = 1, per_step: int = 1, time_step: float = 1.0
) -> ItemGeometry:
    """Return the grid of an item of `size` (height, width). Frames are grouped by `per_step`; the last one is padded.

    Raises:
        InputError: the size cannot be resized, or gives more than MAX_ITEM_ROWS embeddings.
    """
    tall, wide = smart_resize(*size, policy)
    patch = policy.factor // merge
    grid = ItemGeometry(-(-frames // per_step), tall // patch, wide // patch, merge, time_step)
    if grid.num_embeds > MAX_ITEM_ROWS:  # check before any tensor of this length is allocated
        raise InputError(
            f"it makes {grid.num_embeds:,} rows, the limit is {MAX_ITEM_ROWS:,}; lower min_pixels or num_frames",
            code="over_limit",
            limit=MAX_ITEM_ROWS,
            value=grid.num_embeds,
        )
    return grid


def sample_indices(
    total: int, source_fps: float | None, policy: FrameSampling, times: Sequence[float] | None = None
) -> list[int]:
    """Return the numbers of the frames to use, out of `total`, in ascending order; at least one.

    `fps` gives `total / source_fps * fps` frames within the bounds; `num_frames` gives that many. Both are rounded to
    `policy.multiple`, but a video with fewer frames than that is used whole, as by vLLM's loaders. `times`
    are the seconds of every frame, from 0. If they show a variable frame rate, `fps` takes the frames that are on screen at
    equal time steps, each once.

    Raises:
        InputError: the video is empty, `fps` and `num_frames` are both given, or `fps` or a bound in seconds is given and the
            video's rate is unknown.
    """
    usable, seconds = usable_range(total, source_fps, policy, times)
    frames, first = len(usable), usable.start
    fps_of_duration = next(
        (fps for longest, fps in policy.fps_by_duration if seconds is not None and seconds <= longest), policy.fps
    )
    limits = (count for below, count in policy.frames_by_duration if seconds is not None and seconds < below)
    policy = replace(policy, fps=fps_of_duration, max_frames=min(policy.max_frames, next(limits, policy.max_frames)))
    count = _num_frames(frames, seconds, policy)
    if policy.fps is not None and times is not None and seconds and _varies(times, source_fps):
        chosen = _on_screen([time - times[first] for time in times[first : usable.stop]], seconds, count, policy)
    else:
        chosen = _spread(frames, source_fps, seconds, count, policy)
    return [first + i for i in chosen]


def _spread(frames: int, source_fps: float | None, seconds: float | None, count: int, policy: FrameSampling) -> list[int]:
    """Return `count` of `frames` frames by the rule `policy.spread`."""
    if policy.spread == "after":
        return _at_or_after(frames, source_fps, seconds, count, policy)
    if policy.spread == "before" and policy.fps is not None and source_fps is not None and seconds is not None:
        return _at_or_before(frames, source_fps, seconds, policy.fps, policy.max_frames)
    if policy.spread == "last" and policy.fps is not None and source_fps is not None and seconds is not None and frames > 1:
        if seconds <= (policy.max_frames - 1) / policy.fps:
            steps = np.arange(0.0, frames - 1, source_fps / policy.fps)
            return sorted({*(round(i) for i in steps.tolist()), frames - 1})
        count = min(policy.max_frames, frames)
    if policy.spread in _BOTH_ENDS:
        first, last = _without_margin(frames, seconds, policy)
        if policy.spread == "nearest":
            return [round(i) for i in np.linspace(first, last, count)]
        return [int(i) for i in np.linspace(first, last, count)]  # torch's linspace rounds differently in its second half
    start = frames / count / 2 if policy.spread == "middle" else 0
    return [min(int(i), frames - 1) for i in torch.arange(start, frames, frames / count)[:count].int()]


def usable_range(
    total: int, source_fps: float | None, policy: FrameSampling, times: Sequence[float] | None = None
) -> tuple[range, float | None]:
    """Return the numbers of the frames from `start` to `end` or `max_duration`, and their seconds (None: rate unknown).

    The last frame counts as long as the average frame.

    Raises:
        InputError: the video is empty, no frame is left, or a bound in seconds is given and the video's rate is unknown.
    """
    if total < 1:
        raise InputError("the video has no frames")
    varies = times is not None and _varies(times, source_fps)
    seconds = _seconds(total, source_fps, times if varies else None)
    limit, usable = policy.max_duration, range(total)
    if limit is None and not policy.start and policy.end is None:
        return usable, seconds
    if limit is not None and not limit > 0:
        raise InputError(f"max_duration is {limit}; give a positive number of seconds")
    if seconds is None:
        name = "video_start or video_end" if limit is None else "max_duration"
        raise InputError(f"{name} is set but the video's own frame rate is unknown; give metadata with fps")
    if policy.start or policy.end is not None:
        usable, seconds = _cut(total, seconds, source_fps, policy, times if varies else None)
    if limit is None or limit >= seconds:
        return usable, seconds
    first, frames = usable.start, len(usable)
    inside = bisect_left(times, times[first] + limit) - first if times else max(1, math.ceil(limit / seconds * frames - 1e-9))
    return usable[:inside], limit if varies else _seconds(inside, source_fps, None)


def _cut(
    total: int, seconds: float, source_fps: float | None, policy: FrameSampling, times: Sequence[float] | None
) -> tuple[range, float]:
    """Return the frames from `start` to `end`, both included as in qwen-vl-utils, and their seconds.

    `times`: of all frames, if the rate varies.
    """
    start, end = policy.start, seconds if policy.end is None else min(policy.end, seconds)
    rate = source_fps or total / seconds  # not rounded twice, as fps -> seconds -> fps would be
    if start >= seconds:
        raise InputError(f"video_start is {start:g} s, but the video lasts only {seconds:.2f} s", param="video_start")
    if times is not None:
        usable = range(bisect_left(times, start), bisect_right(times, end))
    else:  # a time that is a frame's own up to rounding includes that frame
        usable = range(math.ceil(start * rate - 1e-6), min(math.floor(end * rate + 1e-6) + 1, total))
    if not usable:
        reason = f"no frame lies from {start:g} s to {end:g} s"
        raise InputError(
            f"{reason} of the video, which lasts {seconds:.2f} s; change video_start or video_end", param="video_start"
        )
    if times is None:
        return usable, len(usable) / rate
    return usable, (seconds if usable.stop == total else times[usable.stop]) - times[usable.start]


def _without_margin(frames: int, seconds: float | None, policy: FrameSampling) -> tuple[int, int]:
    """Return the first and the last frame after `policy.margin` is cut off at both ends. Rule: SmolVLM."""
    if not policy.margin or not seconds or seconds - 2 * policy.margin <= policy.max_frames * (policy.fps or 1.0):
        return 0, frames - 1
    margin = policy.margin * frames / seconds
    return int(margin), min(int(frames - margin), frames - 1)


def _seconds(total: int, source_fps: float | None, times: Sequence[float] | None) -> float | None:
    if times is not None and total > 1:
        return times[-1] * total / (total - 1)
    return total / source_fps if source_fps and source_fps > 0 else None


def _varies(times: Sequence[float], fps: float | None) -> bool:
    """Return whether a frame is at least half a frame interval away from its time at a constant rate."""
    return not fps or any(abs(time * fps - i) >= 0.5 for i, time in enumerate(times))


def _on_screen(times: Sequence[float], seconds: float, count: int, policy: FrameSampling) -> list[int]:
    """Return the frames on screen at `count` equal time steps, each once.

    If these are fewer than the bounds or the multiple require, unused frames are added evenly.
    """
    both = policy.spread in _BOTH_ENDS
    steps, span = (count - 1, times[-1]) if both else (count, seconds)
    chosen = {bisect_right(times, span * k / max(1, steps)) - 1 for k in range(count)}
    least = min(count, max(len(chosen), policy.min_frames))
    short = min(count, -(-least // policy.multiple) * policy.multiple) - len(chosen)
    unused = [i for i in range(len(times)) if i not in chosen]
    return sorted(chosen | {unused[i * len(unused) // short] for i in range(short)})


def _at_or_after(frames: int, source_fps: float | None, seconds: float | None, count: int, policy: FrameSampling) -> list[int]:
    """Return the frames of spread "after", as in GLM-4.1V. Beyond `max_frames` steps, the last is at the video's end."""
    if policy.fps is None or source_fps is None or seconds is None:
        places = [i * frames / count for i in range(count)]
    elif seconds * policy.fps <= policy.max_frames:
        if policy.fps >= 2 * source_fps:  # no step skips a frame
            return list(range(frames))
        places = [i * source_fps / policy.fps for i in range(max(1, math.floor(seconds * policy.fps)))]
    else:
        places = [float(position) for position in np.linspace(0, frames, policy.max_frames)]
    return sorted({min(math.ceil(position), frames - 1) for position in places})


def _at_or_before(frames: int, source_fps: float, seconds: float, fps: float, most: int) -> list[int]:
    """Return the frames of spread "before", as in MiniCPM-V 4.6."""
    if seconds * fps <= most:
        chosen = [int(i * source_fps / fps) for i in range(math.ceil(seconds * fps))]
    else:
        steps = max(1, int(min(seconds, 1e300) / 0.1))  # the file claims the duration: never make a list of all steps
        chosen = [int(round(int(i) * 0.1, 1) * source_fps) for i in np.linspace(0.0, float(steps - 1), min(most, steps))]
    return sorted({min(i, frames - 1) for i in chosen})


def _num_frames(total: int, seconds: float | None, policy: FrameSampling) -> int:
    """Return how many frames the policy selects from `total`."""
    multiple = policy.multiple
    if policy.fps is not None and policy.num_frames is not None:
        raise InputError("fps and num_frames exclude each other; give one of them")
    if policy.num_frames is not None:
        if policy.num_frames == 0 or policy.num_frames < -1:
            raise InputError(f"num_frames is {policy.num_frames}; give a positive number, or -1 for all frames")
        if policy.num_frames == -1:
            return total
        return min(total, _at_least(round(policy.num_frames / multiple), multiple, total))
    if policy.fps is None:
        return min(total, policy.max_frames)
    if not policy.fps > 0:
        raise InputError(f"fps is {policy.fps}; give a positive number")
    if seconds is None:
        raise InputError("fps is set but the video's own frame rate is unknown; give num_frames, or metadata with fps")
    most = min(policy.max_frames, total) // multiple * multiple
    count = min(max(seconds * policy.fps, policy.min_frames), most)
    return _at_least(round(count / multiple) if policy.nearest else math.floor(count / multiple), multiple, total)


def _at_least(groups: int, multiple: int, total: int) -> int:
    return groups * multiple if groups > 0 else min(multiple, total)


@dataclass(frozen=True)
class PatchBudget:
    """Constraints of `fit_patches`: at most `max_patches` patches of `patch` x `patch` pixels, and `max_side` patches per side.

    Sides are then padded to whole groups of `merge` patches, so the grid may slightly exceed the first limit.
    """

    patch: int
    merge: int
    max_patches: int
    max_side: int


def fit_patches(height: int, width: int, budget: PatchBudget) -> tuple[int, int]:
    """Return `(height, width)` in pixels after shrinking the image; it is never enlarged. Rule: MoonViT (Kimi).

    Raises:
        InputError: the image is empty.
    """
    if min(height, width) < 1:
        raise InputError(f"an image of {width}x{height} has no pixels")
    patch, most = budget.patch, budget.max_side * budget.patch
    count = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(budget.max_patches / count), most / height, most / width)
    return min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)
