"""The caller's `mm_processor_kwargs`: flat keys for every modality, nested ones for one modality."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..callers.errors import ConfigError, hint, short_repr, typed
from ..mm.geometry import FrameSampling
from ..mm.media.policy import AudioSelection
from ..mm.tiling.slices import MAX_PACKED_FRAMES

ValidKwargs = Mapping[str, Collection[str]]
"""Option names by modality."""

_ALIASES = {"audio_kwargs": "audio"}
MAX_TILES = 4096  # per image; planning tries all arrangements


class Range(NamedTuple):
    """The numbers from `minimum` to `maximum` that an option takes: integers, unless `kind` is float."""

    minimum: float
    maximum: float
    kind: type = int


class ListOf(NamedTuple):
    """The lists and tuples with at least one entry whose entries are all in `choices`, and `word`; `form` describes them."""

    choices: tuple[int, ...]
    form: str
    word: str


_AREA = Range(1, 1 << 48)  # pixels; the limit on the rows of an item is lower
_FLAG = (True, False)
_SECONDS = Range(1e-3, 1e9, float)
SOUND_KWARGS = ("track", "channel")  # which sound of a file is used, for every model that takes audio; see `AudioSelection`
TIME_KWARGS = ("max_duration", "video_end", "video_start")  # the seconds of a video that are used
Values = Mapping[str, Range | ListOf | tuple[object, ...]]
"""The values of options by name: a range of numbers, lists of choices, or the choices."""
VALUES: Values = {
    "beside_image": _FLAG,
    "crop_to_patches": _FLAG,
    "detail": ("auto", "high", "low", "original"),
    "do_image_splitting": _FLAG,
    "do_pan_and_scan": _FLAG,
    "downsample_mode": ("16x", "4x"),
    "dynamic_hd": Range(1, MAX_TILES),
    "enable_patch": _FLAG,
    "fps": Range(1e-3, 1e3, float),
    "force_packing": Range(1, MAX_PACKED_FRAMES),
    "frame_types": ListOf((0, 1), '0 (slow) or 1 (fast) per frame, or "auto"', "auto"),
    "image_aspect_ratio": ("anyres", "pad"),
    "load_audio_from_video": _FLAG,
    "max_crops": Range(1, MAX_TILES),
    "max_duration": _SECONDS,
    "max_dynamic_tiles": Range(1, MAX_TILES),
    "max_frames": Range(1, 1 << 30),
    "max_image_size": (490, 980),
    "max_image_tiles": Range(1, MAX_TILES),
    "max_num_patches": _AREA,
    "max_num_tiles": Range(1, MAX_TILES),
    "max_partition": Range(1, MAX_TILES),
    "max_patches": _AREA,
    "max_pixels": _AREA,
    "max_slice_nums": Range(1, MAX_TILES),
    "max_soft_tokens": (70, 140, 280, 560, 1120),
    "min_frame_similarity": Range(0, 1, float),
    "min_dynamic_tiles": Range(1, MAX_TILES),
    "min_frames": Range(1, 1 << 30),
    "min_num_patches": _AREA,
    "min_patches": _AREA,
    "min_pixels": _AREA,
    "num_crops": Range(1, MAX_TILES),
    "num_frames": Range(1, 1 << 30),
    "pan_and_scan_max_num_crops": Range(1, MAX_TILES),
    "pan_and_scan_min_crop_size": _AREA,
    "pan_and_scan_min_ratio_to_activate": Range(1e-3, 1e9, float),
    "resample": ("torch", "pillow"),
    "resize_to_max_canvas": _FLAG,
    "resized_height": Range(1, 1 << 24),
    "resized_width": Range(1, 1 << 24),
    "size": _AREA,
    "slice_mode": _FLAG,
    "split_image": _FLAG,
    "total_pixels": _AREA,
    "use_audio_in_video": _FLAG,
    "use_image_id": _FLAG,
    "video_end": _SECONDS,
    "video_start": Range(0, 1e9, float),
}
"""The values of the options of the native families. A family adds those of its own with `option_values`."""


def with_sound(valid: ValidKwargs) -> dict[str, tuple[str, ...]]:
    """Return the option names with those of sound, for audio and for videos whose audio may be used."""
    has_sound = {name: name == "audio" or "use_audio_in_video" in options for name, options in valid.items()}
    return {name: (*options, *(SOUND_KWARGS if has_sound[name] else ())) for name, options in valid.items()}


def read_sound(options: Mapping[str, Any]) -> AudioSelection:
    """Return the sound that the options of a modality choose."""
    return AudioSelection(**{name: options[name] for name in SOUND_KWARGS if name in options})


def check_value(name: str, value: Any, values: Values = VALUES) -> None:
    """Raise ConfigError for a value outside `values`. A mapping or list of sides is checked number by number."""
    allowed = values.get(name)
    if isinstance(allowed, Range):
        is_sides = name == "size" and isinstance(value, Mapping | list | tuple)
        for number in ([*value.values()] if isinstance(value, Mapping) else value) if is_sides else [value]:
            if not (is_sides and number is None) and not (name == "num_frames" and type(number) is int and number == -1):
                _check_number(name, number, allowed)
    elif isinstance(allowed, ListOf):
        known_ones = isinstance(value, list | tuple) and all(
            type(choice) is int and choice in allowed.choices for choice in value
        )
        if not (known_ones and value) and not (isinstance(value, str) and value == allowed.word):
            raise ConfigError(f"{name} is {short_repr(value)}; give {allowed.form}", param=name)
    elif allowed is not None and not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = f"{', '.join(map(str, allowed[:-1]))} and {allowed[-1]}"
        raise ConfigError(f"{name} is {short_repr(value)}; the known ones are {choices}", param=name)


def _check_number(name: str, value: object, allowed: Range) -> None:
    is_number = isinstance(value, int if allowed.kind is int else int | float) and not isinstance(value, bool)
    if not isinstance(value, int | float) or not is_number or not value >= allowed.minimum:
        least = "a positive integer" if allowed.kind is int else f"a number of at least {allowed.minimum:g}"
        also = ", or -1 for all frames" if name == "num_frames" else ""
        raise ConfigError(f"{name} is {short_repr(value)}; give {least}{also}", param=name)
    if value > allowed.maximum:
        raise ConfigError(f"{name} is over the limit of {int(allowed.maximum):,}; give less", param=name)


def for_modality(options: Mapping[str, Any], modality: str, valid: ValidKwargs, values: Values = VALUES) -> dict[str, Any]:
    """Return the options of one modality: the flat ones that apply to it, overridden by those under `<modality>s_kwargs`.

    `{"size": {"shortest_edge": 64}, "images_kwargs": {"size": {"longest_edge": 1024}}}` gives images both edges and videos
    the first one only. `audio_kwargs` is also accepted, as in transformers. None means that the option is not given.

    Raises:
        ConfigError: no modality knows a flat key, the modality does not know a nested key, or a value is out of range.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"processing options must be a mapping by name, not {typed(options)}", param="mm_processor_kwargs")
    nests = {f"{name}s_kwargs": name for name in valid} | {name: owner for name, owner in _ALIASES.items() if owner in valid}
    names = sorted({name for several in valid.values() for name in several})
    merged: dict[str, Any] = {}
    for key, value in options.items():
        if key in nests and not isinstance(value, Mapping | None):
            expected = "options by name, e.g. {'max_pixels': 1003520}"
            raise ConfigError(f"{key} holds {expected}, not {typed(value)}", param=str(key))
        if key not in nests:
            _check(key, names, [*names, *nests])
            if key in valid[modality] and value is not None:
                merged[key] = value
    for nest, owner in nests.items():
        for key, value in (options.get(nest) or {}).items():
            others = " and ".join(f"{name}s_kwargs" for name in valid if key in valid[name])
            if key not in valid[owner] and others:
                reason = f"unknown processing option {key!r} for {owner}s; it is one of {others}"
                raise ConfigError(reason, param=str(key))
            _check(key, valid[owner], sorted(valid[owner]), f" for {owner}s")
            if owner == modality and value is not None:
                both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
                merged[key] = {**merged[key], **value} if both else value
    for key, value in merged.items():
        check_value(key, value, values)
    return merged


def apply_sampling(policy: FrameSampling, options: Mapping[str, Any]) -> FrameSampling:
    """Return the policy with `fps` or `num_frames` (each replaces the other's default), its bounds, and the seconds to use.

    Raises:
        ConfigError: both fps and num_frames are given, the bounds contradict each other, or a value is out of range.
    """
    fps, num_frames = options.get("fps"), options.get("num_frames")
    if fps is not None and num_frames is not None:
        raise ConfigError("fps and num_frames exclude each other; give one of them", param="fps")
    for name in ("fps", "num_frames", *TIME_KWARGS):
        if options.get(name) is not None:
            check_value(name, options[name])
    if fps is not None or num_frames is not None:
        policy = replace(policy, fps=fps, num_frames=num_frames, fps_by_duration=(), frames_by_duration=())
    least, most = (options.get(key) for key in ("min_frames", "max_frames"))
    if least is not None:  # rounded as in qwen-vl-utils
        least = -(-least // policy.multiple) * policy.multiple
        policy = replace(policy, min_frames=least, max_frames=max(least, policy.max_frames))
    if most is not None:
        if least is not None and most < least:
            raise ConfigError(
                f"min_frames is {least} and max_frames is {most}; the first must not be larger", param="min_frames"
            )
        policy = replace(policy, max_frames=most, min_frames=min(most, policy.min_frames))
    fields = {"max_duration": "max_duration", "video_start": "start", "video_end": "end"}
    policy = replace(policy, **{field: options[name] for name, field in fields.items() if options.get(name) is not None})
    if policy.end is not None and policy.end < policy.start:
        both = f"video_start is {policy.start:g} and video_end is {policy.end:g}"
        raise ConfigError(f"{both}; the first must not be larger", param="video_start")
    return policy


def is_low_detail(options: Mapping[str, Any]) -> bool:
    """Return whether `detail` is "low", which asks for a small image; ConfigError for an unknown value."""
    detail = options.get("detail", "auto")
    check_value("detail", detail)
    return bool(detail == "low")


def check_keeps_size(options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ConfigError for an option of these names that resizes, which a model that keeps sizes does not do."""
    for name in names:
        if options.get(name) is not None and (name != "detail" or is_low_detail(options)):
            reason = f"{name} resizes images and frames, but this model keeps their size (do_resize=false)"
            raise ConfigError(f"{reason}; leave it out", param=name)


def _check(key: str, allowed: Collection[str], near_to: Sequence[str], where: str = "") -> None:
    if key in allowed:
        return
    if key == "device":
        raise ConfigError("device is not an option of items; <<media_on_gpu>>", param=key)
    reason = hint(key, near_to) if near_to else f"this model has no options{where}, leave it out"
    raise ConfigError(f"unknown processing option {key!r}{where}; {reason}", param=str(key))
