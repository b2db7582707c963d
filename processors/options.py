"""The caller's `mm_processor_kwargs`: flat keys for every modality, nested ones for one modality."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..mm.errors import ConfigError, hint, typed
from ..mm.geometry import FrameSampling

ValidKwargs = Mapping[str, Collection[str]]
"""Option names by modality."""

_ALSO = {"audio_kwargs": "audio"}
_MOST = 10**9  # frames, frames per second, or seconds


def for_modality(options: Mapping[str, Any], modality: str, known: ValidKwargs) -> dict[str, Any]:
    """Return the options of one modality: the flat ones it knows, overlaid with those under `<modality>s_kwargs`.

    `{"size": {"shortest_edge": 64}, "images_kwargs": {"size": {"longest_edge": 1024}}}` gives images both edges and videos
    the first one only. `audio_kwargs` is also accepted, as in transformers. None means that the option is not given.

    Raises:
        ConfigError: no modality knows a flat key, or the modality does not know a nested key. Names the nearest known key.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"processing options are a mapping by name, not {typed(options)}", param="mm_processor_kwargs")
    nests = {f"{name}s_kwargs": name for name in known} | {name: owner for name, owner in _ALSO.items() if owner in known}
    names = sorted({name for several in known.values() for name in several})
    merged: dict[str, Any] = {}
    for key, value in options.items():
        if key in nests and not isinstance(value or {}, Mapping):
            form = "options by name, e.g. {'max_pixels': 1003520}"
            raise ConfigError(f"{key} holds {form}, not {typed(value)}", param=str(key))
        if key not in nests:
            _check(key, names, [*names, *nests])
            if key in known[modality] and value is not None:
                merged[key] = value
    for nest, owner in nests.items():
        for key, value in (options.get(nest) or {}).items():
            others = " and ".join(f"{name}s_kwargs" for name in known if key in known[name])
            if key not in known[owner] and others:
                reason = f"unknown processing option {key!r} for {owner}s; it is one of {others}"
                raise ConfigError(reason, param=str(key))
            _check(key, known[owner], sorted(known[owner]), f" for {owner}s")
            if owner == modality and value is not None:
                both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
                merged[key] = {**merged[key], **value} if both else value
    return merged


def apply_sampling(policy: FrameSampling, options: Mapping[str, Any]) -> FrameSampling:
    """Return the policy with `fps` or `num_frames` (each replaces the other's default) and `max_duration`.

    Raises:
        ConfigError: both fps and num_frames are given, or a value is not a positive number (num_frames -1: all frames).
    """
    fps, num_frames, duration = (options.get(key) for key in ("fps", "num_frames", "max_duration"))
    if fps is not None and num_frames is not None:
        raise ConfigError("fps and num_frames exclude each other; give one of them", param="fps")
    for name, value in (("fps", fps), ("max_duration", duration), ("num_frames", num_frames)):
        if value is not None and name != "num_frames" and not (_number(value, float) and value > 0):
            raise ConfigError(f"{name} is {value!r}; give a positive number", param=name)
        if value is not None and _number(value, float) and value > _MOST:
            raise ConfigError(f"{name} is over the limit of {_MOST:,}; give a smaller number", param=name)
    if num_frames is not None and not (_number(num_frames) and (num_frames > 0 or num_frames == -1)):
        raise ConfigError(f"num_frames is {num_frames!r}; give a positive integer, or -1 for all frames", param="num_frames")
    if fps is not None or num_frames is not None:
        policy = replace(policy, fps=fps, num_frames=num_frames, fps_by_duration=())
    return policy if duration is None else replace(policy, max_duration=duration)


def _number(value: object, *more: type) -> bool:
    return isinstance(value, (int, *more)) and not isinstance(value, bool)


def is_low_detail(options: Mapping[str, Any]) -> bool:
    """Return whether `detail` is "low", which asks for a small image; ConfigError for an unknown value."""
    detail = options.get("detail", "auto")
    if detail not in ("auto", "high", "low"):
        raise ConfigError(f"detail is {detail!r}; the known ones are auto, high and low")
    return bool(detail == "low")


def _check(key: str, known: Collection[str], near_to: Sequence[str], where: str = "") -> None:
    if key in known:
        return
    if key == "device":
        raise ConfigError("device is not an option of items; LLM(..., media_device='cuda') processes them on a GPU", param=key)
    reason = hint(key, near_to) if near_to else f"this model has no options{where}, leave it out"
    raise ConfigError(f"unknown processing option {key!r}{where}; {reason}", param=str(key))
