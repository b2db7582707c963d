"""Runs a small item of each modality through a new model, so that no request waits for what is slow only once."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import prod

import torch

from ...mm.fields import merge
from ...mm.types import AudioItem, ImageItem, MediaItem, VideoItem, VisionChunk
from ...models.interface import Model
from ...processors.interface import ProcessingInfo
from .max_items import frame_plan

_SIDE, _FRAMES = 64, 2  # pixels, frames of a video
_MAX_PATCHES = 256  # on a CPU, where the encoders of some families take seconds for the smallest item
_log = logging.getLogger(__name__)


def encode_small_items(
    model: Model, info: ProcessingInfo, modalities: Iterable[str], dtype: torch.dtype, device: torch.device
) -> None:
    """Encode a small item of each modality. A failure is left to the first request that has such an item."""
    for modality in modalities:
        try:
            item = _small_item(modality, info.decode_spec.rate)
            grid = info.geometry(item.header)
            if device.type == "cpu" and prod((grid.t, grid.h, grid.w)) > _MAX_PATCHES:
                continue
            kwargs, _ = info.process(item, dtype)
            with torch.inference_mode():
                model.embed_multimodal(modality, merge([kwargs], device))
        except Exception:
            _log.debug("encoding a small %s failed", modality, exc_info=True)


def _small_item(modality: str, rate: int) -> MediaItem:
    frames = torch.zeros(_FRAMES, _SIDE, _SIDE, 3, dtype=torch.uint8)
    if modality == "audio":
        return AudioItem(torch.zeros(rate), rate)
    if modality == "video":
        return VideoItem(frames, frame_plan(_FRAMES, 2.0))
    return ImageItem(frames[0]) if modality == "image" else VisionChunk(frames[:1])
