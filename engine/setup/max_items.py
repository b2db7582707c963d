"""Finds the max item of each modality: the largest image, video and audio that a model and its settings admit.

It tries sizes with `ProcessingInfo.geometry`, which is pure and takes microseconds; nothing is processed or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ...callers.errors import ConfigError, InputError
from ...mm.media.policy import MediaPolicy
from ...mm.types import FramePlan, MediaHeader
from ...processors.interface import ProcessingInfo

_RATIOS = tuple(200.0 ** (step / 64) for step in range(65))  # of long to short side; processors refuse longer ones
_AREA_STEP = 2.0
_FRAMES_PER_ROW = 16  # more than any processor merges into one row
_FPS = 24.0  # assumed where the sampling policy has no rate
_VIDEO_SIZE = (720, 1280)  # height and width for which the max length of a video is reported
_UNLIMITED = (1 << 40, 1 << 12)  # more than any item has: pixels, and patches or tiles
_SIZE_OPTIONS = ("max_pixels", "max_patches", "max_num_patches", "size")  # options that bound the pixels an image keeps


@dataclass(frozen=True)
class ItemLimits:
    """Limits on an item: tokens of the prompt, bytes of encoder rows, and the names of the settings behind them."""

    tokens: int
    tokens_setting: str
    encoder_bytes: int
    row_bytes: int
    policy: MediaPolicy

    def exceeded_setting(self, info: ProcessingInfo, header: MediaHeader) -> str | None:
        """Return the setting whose limit the item exceeds; None if it fits."""
        try:
            grid = info.geometry(header)
        except InputError:
            return "the model"
        if grid.num_embeds * self.row_bytes > self.encoder_bytes:
            return "encoder_cache_bytes"
        return self.tokens_setting if info.span(header.modality, grid).max_added_tokens > self.tokens else None


@dataclass(frozen=True)
class MaxItem:
    """The largest item of a modality: a square image, a video of 1280x720, or audio.

    Args:
        rows: encoder rows of the item; 0 if no item fits.
        limit: the setting that stops a larger item.
        refused: True if a larger item is refused, False if it is resized to this one.
        size: (height, width) in pixels, (0, 0) for audio.
        frames: frames of a video that are used, else 0.
        seconds: of a video or audio.
    """

    modality: str
    rows: int
    limit: str
    refused: bool = True
    size: tuple[int, int] = (0, 0)
    frames: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.rows:
            of = f" of {self.size[1]}x{self.size[0]} pixels" if self.size[0] else ""
            return f"no {self.modality.replace('_', ' ')}{of} fits, limited by {self.limit}"
        parts = [f"{self.size[1]}x{self.size[0]} pixels"] if self.size[0] else []
        parts += [f"{self.frames} frames"] if self.frames else []
        parts += [f"{self.seconds:g} s"] if self.seconds else []
        if self.size == (1, 1) and not self.refused:
            return f"a square of any size: {self.rows} rows, limited by {self.limit} (all are resized)"
        larger = "larger ones are refused" if self.refused else "larger ones are resized"
        return f"{', '.join(parts)}: {self.rows} rows, limited by {self.limit} ({larger})"


def num_rows(info: ProcessingInfo, header: MediaHeader) -> int:
    """Return the encoder rows of an item, 0 if the processor refuses it."""
    try:
        return info.geometry(header).num_embeds
    except InputError:
        return 0


def header_of(info: ProcessingInfo, modality: str, size: tuple[int, int], frames: FramePlan | None = None) -> MediaHeader:
    """Return the header of the largest item that a model takes without resizing; it is at most `size` (height, width)."""
    return MediaHeader(modality, *info.kept_size(modality, size), frames)


def max_rows(info: ProcessingInfo, modality: str, policy: MediaPolicy, cap: int) -> int:
    """Return the encoder rows of the largest item of a modality over all shapes, at most `cap`.

    It samples shapes and areas and then climbs from the best, so a result below the cap may be slightly too small.
    """
    if modality == "audio":
        return min(cap, num_rows(info, MediaHeader(modality, samples=max_samples(info, policy, cap))))
    for frames in _frame_plans(info, modality, policy, cap):
        side = math.isqrt(_max_pixels(frames, policy))
        if num_rows(info, header_of(info, modality, (side, side), frames)) >= cap:
            return cap  # as for most videos
    best = 0
    for frames in _frame_plans(info, modality, policy, cap):
        rows = partial(_num_rows_of_size, info, modality, frames)
        best = max(best, _max_of_shapes(rows, _max_pixels(frames, policy), cap))
    return min(cap, best)


def max_samples(info: ProcessingInfo, policy: MediaPolicy, cap: int) -> int:
    """Return the samples of the longest audio of at most `cap` rows that policy and processor admit; 0 if there is none."""
    limit = min(int(policy.max_audio_seconds * info.decode_spec.rate), policy.max_decoded_bytes // 4)

    def takes(samples: int) -> bool:
        return 0 < num_rows(info, MediaHeader("audio", samples=samples)) <= cap

    return last_true(takes, _first_taken_power(takes, limit), limit)


def _first_taken_power(takes: Callable[[int], bool], limit: int) -> int:
    """Return the first power of 2 for which `takes` holds, or one above `limit`. Shorter audio may give no encoder row."""
    start = 1
    while start < limit and not takes(start):
        start *= 2
    return start


def find_max_item(modality: str, info: ProcessingInfo, limits: ItemLimits) -> MaxItem:
    """Return the max item of a modality, found by bisection: larger ones of its shape are refused or resized."""
    if modality == "audio":
        return _max_audio(info, limits)
    return _max_video(info, limits) if modality == "video" else _max_image(modality, info, limits)


def _max_image(modality: str, info: ProcessingInfo, limits: ItemLimits) -> MaxItem:
    def header(side: int) -> MediaHeader:
        return header_of(info, modality, (side, side))

    most, least = math.isqrt(limits.policy.max_pixels), 1
    while least < most and not num_rows(info, header(least)):  # an image may be too small for one encoder row
        least *= 2
    side = last_true(lambda n: limits.exceeded_setting(info, header(n)) is None, least, most)
    rows = num_rows(info, header(side)) if side else 0
    if side < most:
        limit = limits.exceeded_setting(info, header(side + 1 if side else least)) or ""
        return MaxItem(modality, rows, limit, size=header(side).size if side else (0, 0))
    option = next((name for name in _SIZE_OPTIONS if _rows_without_limit(info, modality, name, header(side)) > rows), None)
    if option is None:
        return MaxItem(modality, rows, "media.max_pixels", size=header(side).size)
    side = 1 + last_true(lambda n: num_rows(info, header(n)) < rows, 1, most)  # the smallest that makes as many rows
    return MaxItem(modality, rows, f"mm_processor_kwargs {option}", refused=False, size=(side, side))


def _rows_without_limit(info: ProcessingInfo, modality: str, option: str, header: MediaHeader) -> int:
    """Return the rows of an item with an option set to unlimited; 0 if the processor has no such option."""
    for most in _UNLIMITED:
        try:
            chosen = {"longest_edge": most} if option == "size" else most
            return num_rows(info.with_kwargs({f"{modality}s_kwargs": {option: chosen}}), header)
        except ConfigError:
            continue
    return 0


def _max_video(info: ProcessingInfo, limits: ItemLimits) -> MaxItem:
    sampling, policy = info.decode_spec.sampling, limits.policy
    height, width = _VIDEO_SIZE
    if height * width > policy.max_pixels:
        height = width = math.isqrt(policy.max_pixels)
    fps = sampling.fps or _FPS
    bounds = {
        "media.max_video_bytes": policy.max_video_bytes // (3 * height * width),
        "max_frames of the checkpoint": sampling.max_frames,
    }
    if sampling.num_frames is not None and sampling.num_frames > 0:
        bounds["mm_processor_kwargs num_frames"] = sampling.num_frames
    if sampling.max_duration is not None:
        bounds["mm_processor_kwargs max_duration"] = int(sampling.max_duration * fps)
    if sampling.end is not None:
        bounds["mm_processor_kwargs video_end"] = int((sampling.end - sampling.start) * fps) + 1
    bound = min(bounds, key=lambda name: bounds[name])

    def header(count: int) -> MediaHeader:
        return header_of(info, "video", (height, width), frame_plan(count, fps))

    count = last_true(lambda n: limits.exceeded_setting(info, header(n)) is None, 1, bounds[bound])
    rows = num_rows(info, header(count)) if count else 0
    fits = count == bounds[bound]
    limit = bound if fits else limits.exceeded_setting(info, header(count + 1)) or ""
    refused = not fits or bound.startswith("media")
    return MaxItem("video", rows, limit, refused, header(max(count, 1)).size, count, round(count / fps, 2))


def _max_audio(info: ProcessingInfo, limits: ItemLimits) -> MaxItem:
    rate, rows = info.decode_spec.rate, limits.encoder_bytes // limits.row_bytes
    samples = max_samples(info, limits.policy, min(limits.tokens, rows) if "audio" in info.placeholder_ids else rows)
    more = samples + 1
    if not samples:
        more = _first_taken_power(lambda n: num_rows(info, MediaHeader("audio", samples=n)) > 0, 60 * rate)
    over = MediaHeader("audio", samples=more)
    if more / rate > limits.policy.max_audio_seconds:
        limit = "media.max_audio_seconds"
    elif 4 * more > limits.policy.max_decoded_bytes:
        limit = "media.max_decoded_bytes"
    else:
        limit = limits.exceeded_setting(info, over) or ""
    return MaxItem("audio", num_rows(info, MediaHeader("audio", samples=samples)), limit, seconds=samples / rate)


def last_true(holds: Callable[[int], bool], first: int, limit: int) -> int:
    """Return the largest n in `[first, limit]` up to which `holds` is true, by bisection; 0 if it is false for `first`."""
    if first > limit or not holds(first):
        return 0
    good, bad = first, first + 1
    while bad <= limit and holds(bad):
        good, bad = bad, bad + 2 * (bad - first)
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def frame_plan(count: int, fps: float) -> FramePlan:
    """Return a plan that uses `count` consecutive frames of `1 / fps` seconds each."""
    return FramePlan(tuple(range(count)), tuple(i / fps for i in range(count)), count, fps)


def _frame_plans(info: ProcessingInfo, modality: str, policy: MediaPolicy, cap: int) -> Iterator[FramePlan | None]:
    """Yield the frame plans to try: None for an image, one chunk for video chunks, doubling frame counts for a video.

    Frames that come with their own timestamps are all used, so the sampling policy does not bound their number. Three things
    bound it: their bytes, the processor if it refuses that many at any size, and the cap, because few frames share a row.
    """
    fps = info.decode_spec.sampling.fps or _FPS
    if modality != "video":
        yield None
    if modality == "vision_chunk":
        yield frame_plan(info.decode_spec.frames_per_chunk, fps)
    count, taken = 1, False
    while modality == "video" and 3 * count <= policy.max_video_bytes and count <= _FRAMES_PER_ROW * cap:
        frames = frame_plan(count, fps)
        takes = _is_taken(info, modality, frames, policy)
        if taken and not takes:
            return
        taken = takes
        yield frames
        count *= 2


def _is_taken(info: ProcessingInfo, modality: str, frames: FramePlan, policy: MediaPolicy) -> bool:
    """Return whether the processor accepts that many frames at any size."""
    longest = math.isqrt(_max_pixels(frames, policy))
    sides = [1 << power for power in range(longest.bit_length())]
    return any(num_rows(info, header_of(info, modality, (side, side), frames)) for side in sides)


def _max_pixels(frames: FramePlan | None, policy: MediaPolicy) -> int:
    """Return the maximum pixels of an image or frame that the policy admits."""
    if frames is None:
        return policy.max_pixels
    return min(policy.max_pixels, policy.max_video_bytes // (3 * len(frames.indices)))


def _num_rows_of_size(info: ProcessingInfo, modality: str, frames: FramePlan | None, height: int, width: int) -> int:
    return num_rows(info, header_of(info, modality, (height, width), frames))


def _max_of_shapes(rows: Callable[[int, int], int], max_pixels: int, cap: int) -> int:
    """Return the maximum of `rows(height, width)` over sampled shapes of at most `max_pixels`; stops at `cap`."""
    best, where = 0, (1, 1)
    for ratio in _RATIOS:
        area = float(max_pixels)
        while area >= 1:
            short = max(1, int((area / ratio) ** 0.5))
            long = int(short * ratio)
            for size in {(short, long), (long, short)} if short * long <= max_pixels else ():
                count = rows(*size)
                if count > best:
                    best, where = count, size
            if best >= cap:
                return best
            area /= _AREA_STEP
    return _climb(rows, where, best, max_pixels)


def _climb(rows: Callable[[int, int], int], where: tuple[int, int], best: int, max_pixels: int) -> int:
    """Return the maximum found by hill climbing from `where` in steps of a few pixels."""
    steps = [(dh, dw) for dh in (-32, -8, 0, 8, 32) for dw in (-32, -8, 0, 8, 32)]
    while True:
        near = [(max(1, where[0] + dh), max(1, where[1] + dw)) for dh, dw in steps]
        nearby = max(((rows(h, w), (h, w)) for h, w in near if h * w <= max_pixels), default=(0, where))
        if nearby[0] <= best:
            return best
        best, where = nearby
