"""The largest picture, clip and sound that a model and its settings take, found by asking the family. Knows no family.

`ProcessingInfo.geometry` is pure and takes microseconds, so sizes are tried; nothing is made or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from ..mm.errors import InputError
from ..mm.media.policy import MediaPolicy
from ..mm.types import FramePlan, MediaHeader
from ..processors.interface import ProcessingInfo

_RATIOS = tuple(200.0 ** (step / 12) for step in range(-12, 13))  # height by width; families refuse longer ones
_AREA_STEP = 2**0.5
_FPS = 24.0  # of bare frames, where the sampling policy names no rate


def rows_of(info: ProcessingInfo, header: MediaHeader) -> int:
    """Encoder rows of an item, 0 where the family refuses it."""
    try:
        return info.geometry(header).num_embeds
    except InputError:
        return 0


def most_rows(info: ProcessingInfo, modality: str, policy: MediaPolicy, cap: int) -> int:
    """Encoder rows of the largest item of a modality, of whatever shape, at most `cap`.

    Shapes and areas are sampled, then the best is moved a little: below the cap the answer may be a few in a hundred short.
    """
    if modality == "audio":
        return min(cap, rows_of(info, MediaHeader(modality, samples=most_samples(info, policy, cap))))
    if any(rows_of(info, _square(modality, frames, policy)) >= cap for frames in _frames(info, modality, policy)):
        return cap  # most clips end here
    best = 0
    for frames in _frames(info, modality, policy):
        rows = partial(_rows_of_size, info, modality, frames)
        best = max(best, _most_of_shapes(rows, _most_pixels(frames, policy), cap))
    return min(cap, best)


def most_samples(info: ProcessingInfo, policy: MediaPolicy, cap: int) -> int:
    """Samples of the longest sound that the policy and the family take, and that makes at most `cap` rows; 0 for none."""
    limit = int(policy.max_audio_seconds * info.decode_spec.rate)

    def takes(samples: int) -> bool:
        return 0 < rows_of(info, MediaHeader("audio", samples=samples)) <= cap

    start = 1
    while start < limit and not takes(start):  # too short a sound makes no row
        start *= 2
    return last_true(takes, start, limit)


def last_true(holds: Callable[[int], bool], first: int, limit: int) -> int:
    """The largest number from `first` to `limit` up to which `holds` is true, without looking at each; 0 if not for `first`."""
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
    """So many frames in a row, each `1 / fps` seconds."""
    return FramePlan(tuple(range(count)), tuple(i / fps for i in range(count)), count, fps)


def _frames(info: ProcessingInfo, modality: str, policy: MediaPolicy) -> Iterator[FramePlan | None]:
    """What an item of this modality may hold: a picture (None), a piece of a video, a clip of ever more frames.

    Frames that come with their own times are all used, so the sampling policy does not bound them, their bytes do.
    """
    fps = info.decode_spec.sampling.fps or _FPS
    if modality != "video":
        yield None
    if modality == "vision_chunk":
        yield frame_plan(info.decode_spec.frames_per_chunk, fps)
    count = 1
    while modality == "video" and 3 * count <= policy.max_video_bytes:
        yield frame_plan(count, fps)
        count *= 2


def _most_pixels(frames: FramePlan | None, policy: MediaPolicy) -> int:
    """Of one picture or frame that the policy lets in."""
    if frames is None:
        return policy.max_pixels
    return min(policy.max_pixels, policy.max_video_bytes // (3 * len(frames.indices)))


def _square(modality: str, frames: FramePlan | None, policy: MediaPolicy) -> MediaHeader:
    side = math.isqrt(_most_pixels(frames, policy))
    return MediaHeader(modality, side, side, frames)


def _rows_of_size(info: ProcessingInfo, modality: str, frames: FramePlan | None, height: int, width: int) -> int:
    return rows_of(info, MediaHeader(modality, height, width, frames))


def _most_of_shapes(rows: Callable[[int, int], int], most_pixels: int, cap: int) -> int:
    """The most of `rows(height, width)` over sampled shapes of at most `most_pixels`; stops above `cap`."""
    best, where = 0, (1, 1)
    for ratio in _RATIOS:
        area = float(most_pixels)
        while area >= 1:
            size = max(1, int((area * ratio) ** 0.5)), max(1, int((area / ratio) ** 0.5))
            found = rows(*size) if size[0] * size[1] <= most_pixels else 0
            if found > best:
                best, where = found, size
            if best >= cap:
                return best
            area /= _AREA_STEP
    return _climb(rows, where, best, most_pixels)


def _climb(rows: Callable[[int, int], int], where: tuple[int, int], best: int, most_pixels: int) -> int:
    """The most that steps of a few pixels from `where` lead to."""
    steps = [(dh, dw) for dh in (-32, -8, 0, 8, 32) for dw in (-32, -8, 0, 8, 32)]
    while True:
        near = [(max(1, where[0] + dh), max(1, where[1] + dw)) for dh, dw in steps]
        found = max(((rows(h, w), (h, w)) for h, w in near if h * w <= most_pixels), default=(0, where))
        if found[0] <= best:
            return best
        best, where = found
