"""Input processing of Qwen3-Omni's thinker: images and videos at native resolution, audio at 13 rows per second."""

from __future__ import annotations

from dataclasses import replace

from ....processors.bases.aut import AutInfo
from ....processors.bases.thinker import ThinkerInfo
from ..qwen3_vl.processing import DEEPSTACK_LAYERS, PATCHES


class _Qwen3AudioInfo(AutInfo):
    placeholders = {"audio": ("audio_token_id", 151646)}
    max_seconds = 2400  # as the technical report says


class Qwen3OmniProcessingInfo(ThinkerInfo):
    """ProcessingInfo of Qwen3-Omni."""

    placeholders = {
        "image": ("image_token_id", 151655),
        "video": ("video_token_id", 151656),
        **_Qwen3AudioInfo.placeholders,
    }
    patch_specs = {
        "image": PATCHES,
        "video": replace(PATCHES, min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32),
    }
    deepstack_layers = DEEPSTACK_LAYERS
    audio_info = _Qwen3AudioInfo
    audio_text = "<|audio_start|><|audio_pad|><|audio_end|>"
    language_codes = (
        "ar", "yue", "zh", "nl", "en", "fr", "de", "id", "it", "ja", "ko", "ms", "pt", "ru", "es", "th", "tr", "ur", "vi",
    )  # fmt: skip

    def instruction(self, language: str | None, task: str) -> str:
        """Return the instruction of the publisher's evaluation, which is in Chinese for Chinese."""
        if language == "Chinese" and task == "transcribe":
            return "\u8bf7\u5c06\u8fd9\u6bb5\u4e2d\u6587\u8bed\u97f3\u8f6c\u6362\u4e3a\u7eaf\u6587\u672c\u3002"
        return super().instruction(language, task)
