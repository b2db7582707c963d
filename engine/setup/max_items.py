"""The largest picture, clip and sound that a model and its settings take, found by asking the family. Knows no family.

`ProcessingInfo.geometry` is pure and takes microseconds, so sizes are tried; nothing is made or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..mm.errors import ConfigError, InputError
from ..mm.media.policy import MediaPolicy
from ..mm.types import FramePlan, MediaHeader
from ..processors.interface import ProcessingInfo

_RATIOS = tuple(200.0 ** (step / 64) for step in range(65))  # of long to short side; families refuse longer ones
_AREA_STEP = 2.0
_FRAMES_PER_ROW = 16  # more than any family joins in one row
_FPS = 24.0  # of bare frames, where the sampling policy names no rate
_CLIP = (720, 1280)  # height and width of the frames that a clip's length is told for
_UNBOUNDED = (1 << 40, 1 << 12)  # more than any item takes: pixels, and pieces
_CALLED = {"image": "picture", "video": "clip", "audio": "sound"}
_FINER = ("max_pixels", "max_patches", "size")  # options that let a picture keep more pixels


@dataclass(frozen=True)
class Room:
    """What an item may take: tokens of a prompt and bytes of encoder rows, and which setting says so."""

    tokens: int
    tokens_setting: str
    encoder_bytes: int
    row_bytes: int
    policy: MediaPolicy

    def setting(self, info: ProcessingInfo, header: MediaHeader) -> str | None:
        """The setting by which the item does not fit; None if it does."""
        try:
            grid = info.geometry(header)
        except InputError:
            return "the model"
        if grid.num_embeds * self.row_bytes > self.encoder_bytes:
            return "encoder_cache_bytes"
        return self.tokens_setting if info.span(header.modality, grid).length > self.tokens else None


@dataclass(frozen=True)
class Largest:
    """The largest item of a modality: a square picture, a clip of 1280x720 or a sound.

    Args:
        size: (height, width) in pixels, (0, 0) for sound.
        frames: used of a clip, else 0. seconds: of a clip or sound.
        rows: encoder rows it makes. limit: the setting that stops a larger one.
        refused: whether a larger one is refused; else it is made smaller to this.
    """

    modality: str
    size: tuple[int, int]
    frames: int
    seconds: float
    rows: int
    limit: str
    refused: bool

    def __str__(self) -> str:
        if not self.rows:
            of = f" of {self.size[1]}x{self.size[0]} pixels" if self.size[0] else ""
            return f"no {_CALLED.get(self.modality, 'item')}{of} fits, limited by {self.limit}"
        parts = [f"{self.size[1]}x{self.size[0]} pixels"] if self.size[0] else []
        parts += [f"{self.frames} frames"] if self.frames else []
        parts += [f"{self.seconds:g} s"] if self.seconds else []
        fate = "larger ones are refused" if self.refused else "larger ones are made smaller"
        return f"{', '.join(parts)}: {self.rows} rows, limited by {self.limit} ({fate})"


def rows_of(info: ProcessingInfo, header: MediaHeader) -> int:
    """Encoder rows of an item, 0 where the family refuses it."""
    try:
        return info.geometry(header).num_embeds
    except InputError:
        return 0


def most_rows(info: ProcessingInfo, modality: str, policy: MediaPolicy, cap: int) -> int:
    """Encoder rows of the largest item of a modality, of whatever shape, at most `cap`.

    Shapes and areas are sampled, then the best is moved a little: below the cap the answer may be a little short.
    """
    if modality == "audio":
        return min(cap, rows_of(info, MediaHeader(modality, samples=most_samples(info, policy, cap))))
    if any(rows_of(info, _square(modality, frames, policy)) >= cap for frames in _frames(info, modality, policy, cap)):
        return cap  # most clips end here
    best = 0
    for frames in _frames(info, modality, policy, cap):
        rows = partial(_rows_of_size, info, modality, frames)
        best = max(best, _most_of_shapes(rows, _most_pixels(frames, policy), cap))
    return min(cap, best)


def most_samples(info: ProcessingInfo, policy: MediaPolicy, cap: int) -> int:
    """Samples of the longest sound that the policy and the family take, and that makes at most `cap` rows; 0 for none."""
    limit = int(policy.max_audio_seconds * info.decode_spec.rate)

    def takes(samples: int) -> bool:
        return 0 < rows_of(info, MediaHeader("audio", samples=samples)) <= cap

    return last_true(takes, _shortest(takes, limit), limit)


def _shortest(takes: Callable[[int], bool], limit: int) -> int:
    """Samples of a sound that is taken, in powers of 2; too short a one makes no row."""
    start = 1
    while start < limit and not takes(start):
        start *= 2
    return start


def largest_item(modality: str, info: ProcessingInfo, room: Room) -> Largest:
    """What fits, by trying; nothing larger of the same shape does, or it is made smaller."""
    if modality == "audio":
        return _largest_sound(info, room)
    return _largest_clip(info, room) if modality == "video" else _largest_picture(modality, info, room)


def _largest_picture(modality: str, info: ProcessingInfo, room: Room) -> Largest:
    def header(side: int) -> MediaHeader:
        return MediaHeader(modality, side, side)

    most, least = math.isqrt(room.policy.max_pixels), 1
    while least < most and not rows_of(info, header(least)):  # too small a picture may make no row
        least *= 2
    side = last_true(lambda n: room.setting(info, header(n)) is None, least, most)
    rows = rows_of(info, header(side)) if side else 0
    if side < most:
        return Largest(
            modality, (side, side), 0, 0.0, rows, room.setting(info, header(side + 1 if side else least)) or "", True
        )
    option = next((name for name in _FINER if _finer(info, modality, name, header(side)) > rows), None)
    if option is None:
        return Largest(modality, (side, side), 0, 0.0, rows, "media.max_pixels", True)
    side = 1 + last_true(lambda n: rows_of(info, header(n)) < rows, 1, most)  # the first that keeps all its pixels
    return Largest(modality, (side, side), 0, 0.0, rows, f"mm_processor_kwargs {option}", False)


def _finer(info: ProcessingInfo, modality: str, option: str, header: MediaHeader) -> int:
    """Rows of an item where an option allows any size; 0 where the family has no such option."""
    for most in _UNBOUNDED:
        try:
            chosen = {"longest_edge": most} if option == "size" else most
            return rows_of(info.tuned({f"{modality}s_kwargs": {option: chosen}}), header)
        except ConfigError:
            continue
    return 0


def _largest_clip(info: ProcessingInfo, room: Room) -> Largest:
    sampling, policy = info.decode_spec.sampling, room.policy
    height, width = _CLIP
    if height * width > policy.max_pixels:
        height = width = math.isqrt(policy.max_pixels)
    fps = sampling.fps or _FPS
    limits = {
        "media.max_video_bytes": policy.max_video_bytes // (3 * height * width),
        "max_frames of the checkpoint": sampling.max_frames,
    }
    if sampling.num_frames is not None and sampling.num_frames > 0:
        limits["mm_processor_kwargs num_frames"] = sampling.num_frames
    if sampling.max_duration is not None:
        limits["mm_processor_kwargs max_duration"] = int(sampling.max_duration * fps)
    bound = min(limits, key=lambda name: limits[name])

    def header(count: int) -> MediaHeader:
        return MediaHeader("video", height, width, frame_plan(count, fps))

    count = last_true(lambda n: room.setting(info, header(n)) is None, 1, limits[bound])
    rows = rows_of(info, header(count)) if count else 0
    fits = count == limits[bound]
    limit = bound if fits else room.setting(info, header(count + 1)) or ""
    refused = not fits or bound.startswith("media")
    return Largest("video", (height, width), count, round(count / fps, 2), rows, limit, refused)


def _largest_sound(info: ProcessingInfo, room: Room) -> Largest:
    rate, rows = info.decode_spec.rate, room.encoder_bytes // room.row_bytes
    samples = most_samples(info, room.policy, min(room.tokens, rows) if "audio" in info.slot_ids else rows)
    more = samples + 1
    if not samples:
        more = _shortest(lambda n: rows_of(info, MediaHeader("audio", samples=n)) > 0, 60 * rate)
    over = MediaHeader("audio", samples=more)
    long = more / rate > room.policy.max_audio_seconds
    limit = "media.max_audio_seconds" if long else room.setting(info, over) or ""
    return Largest("audio", (0, 0), 0, samples / rate, rows_of(info, MediaHeader("audio", samples=samples)), limit, True)


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


def _frames(info: ProcessingInfo, modality: str, policy: MediaPolicy, cap: int) -> Iterator[FramePlan | None]:
    """What an item of this modality may hold: a picture (None), a piece of a video, a clip of ever more frames.

    Frames that come with their own times are all used, so the sampling policy does not bound them. Their bytes do, the
    family where it refuses so many at any size, and the cap, as no family makes one row of more frames than a few.
    """
    fps = info.decode_spec.sampling.fps or _FPS
    if modality != "video":
        yield None
    if modality == "vision_chunk":
        yield frame_plan(info.decode_spec.frames_per_chunk, fps)
    count, taken = 1, False
    while modality == "video" and 3 * count <= policy.max_video_bytes and count <= _FRAMES_PER_ROW * cap:
        frames = frame_plan(count, fps)
        takes = _takes(info, modality, frames, policy)
        if taken and not takes:
            return
        taken = takes
        yield frames
        count *= 2


def _takes(info: ProcessingInfo, modality: str, frames: FramePlan, policy: MediaPolicy) -> bool:
    """Whether the family makes rows of so many frames at any size."""
    longest = math.isqrt(_most_pixels(frames, policy))
    sides = [1 << power for power in range(longest.bit_length())]
    return any(rows_of(info, MediaHeader(modality, side, side, frames)) for side in sides)


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
            short = max(1, int((area / ratio) ** 0.5))
            long = int(short * ratio)
            for size in {(short, long), (long, short)} if short * long <= most_pixels else ():
                found = rows(*size)
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
