"""Input processing of Qwen3-Omni's thinker: images and videos at native resolution, audio at 13 rows per second."""

from __future__ import annotations

from dataclasses import replace

from ..bases.aut import AutInfo
from ..bases.thinker import ThinkerInfo
from .qwen3_vl import DEEPSTACK_LAYERS, PATCHES


class _AudioInfo(AutInfo):
    placeholders = {"audio": ("audio_token_id", 151646)}
    max_seconds = 2400  # as the technical report says


class Qwen3OmniProcessingInfo(ThinkerInfo):
    """ProcessingInfo of Qwen3-Omni."""

    placeholders = {
        "image": ("image_token_id", 151655),
        "video": ("video_token_id", 151656),
        **_AudioInfo.placeholders,
    }
    patch_specs = {
        "image": PATCHES,
        "video": replace(PATCHES, min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32),
    }
    deepstack_layers = DEEPSTACK_LAYERS
    audio_info = _AudioInfo
