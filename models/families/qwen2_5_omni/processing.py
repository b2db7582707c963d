"""Input processing of Qwen2.5-Omni's thinker: images and videos at native resolution, audio at 25 rows per second."""

from __future__ import annotations

from dataclasses import replace

from ....mm.rules import Rule
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.audio import AudioInfo
from ....processors.bases.thinker import ThinkerInfo
from ....processors.mel import MelSpec
from ....processors.patches import PatchSpec
from ..qwen2_audio.processing import conv_and_pool_rows
from .rules import joined_edges


class _Qwen25AudioInfo(AudioInfo):
    """Audio of up to five minutes; the encoder works in windows of two seconds."""

    placeholders = {"audio": ("audio_token_id", "audio_token_index", 151646)}
    mel_defaults = MelSpec(num_mel_bins=128, max_samples=4_800_000)

    def num_rows(self, frames: int) -> int:
        return conv_and_pool_rows(frames)

    def num_input_frames(self, frames: int) -> int:
        """Return the frames without silence."""
        return frames


class Qwen25OmniProcessingInfo(ThinkerInfo):
    """ProcessingInfo of Qwen2.5-Omni."""

    placeholders = {
        "image": ("image_token_id", "image_token_index", 151655),
        "video": ("video_token_id", "video_token_index", 151656),
        **_Qwen25AudioInfo.placeholders,
    }
    patch_specs = {"image": PatchSpec(), "video": PatchSpec(min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28)}
    audio_info = _Qwen25AudioInfo
    audio_text = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    language_codes = ("en", "zh", "yue", "fr", "ru")

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid; the start and end token of a video's audio share the positions of the video's own."""
        geometry = super().geometry(header)
        return replace(geometry, positions=Rule.of(joined_edges)) if header.modality == "video" else geometry

    @property
    def positions_per_chunk(self) -> int:
        """The positions of two seconds."""
        return int(self.positions_per_second * self.files.config.get("seconds_per_chunk", 2))

    def instruction(self, language: str | None, task: str) -> str:
        """Return the instruction of the publisher's cookbook, which asks for a transcript without punctuation."""
        text = super().instruction(language, task)
        return text if task == "translate" else f"{text[:-1]} without any punctuation marks."

    def system_turn(self, task: str) -> str:
        kind = "translation" if task == "translate" else "recognition"
        return f"<|im_start|>system\nYou are a speech {kind} model.<|im_end|>\n"
