"""What a caller gives as `multi_modal_data` becomes items, counted against limits. Knows no family."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from .errors import InputError
from .media.image import load_image
from .media.video import load_video
from .types import MediaItem


def parse_media(
    multi_modal_data: Mapping[str, object],
    limits: Mapping[str, int],
    modalities: Collection[str],
    sampling: Mapping[str, Any],
) -> dict[str, list[MediaItem]]:
    """Decoded items by modality, in the order given; a single item and a list of one are the same.

    `limits`: most items per modality in one prompt (absent: no limit). `modalities`: what the model takes.
    `sampling`: arguments of the frame sampler. Counts are checked before anything is decoded.

    Raises:
        InputError: a modality the model does not take, or too many items.
        MediaError: an item that cannot be decoded, by name.
    """
    several = {name: listed(name, value, modalities) for name, value in multi_modal_data.items()}
    for name, values in several.items():
        check_limit(name, len(values), limits)
    loaders: dict[str, Callable[[object, int], MediaItem]] = {
        "image": load_image,
        "video": lambda value, index: load_video(value, index, sampling),
    }
    return {name: [loaders[name](value, index) for index, value in enumerate(values)] for name, values in several.items()}


def listed(modality: str, value: object, modalities: Collection[str]) -> list[object]:
    """The separate items of one modality; a list of frames, or one 4-D array, is one clip."""
    if modality not in modalities:
        near = difflib.get_close_matches(modality, modalities, n=3, cutoff=0.6) or sorted(modalities)
        raise InputError(f"unknown modality {modality!r}; this model takes {', '.join(near) or 'text only'}")
    if modality == "video":
        return _clips(value)
    return list(value) if isinstance(value, list | tuple) else [value]


def check_limit(modality: str, count: int, limits: Mapping[str, int]) -> None:
    """InputError when `count` items are over the limit of their modality."""
    limit = limits.get(modality)
    if limit is not None and count > limit:
        raise InputError(f"At most {limit} {modality}(s) may be provided in one prompt, not {count}")


def _clips(value: object) -> list[object]:
    if isinstance(value, np.ndarray | Tensor):
        return list(value) if value.ndim == 5 else [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return [value]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return [value]
    return [value] if value and all(_is_frame(v) for v in value) else list(value)


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray | Tensor) and value.ndim <= 3)
