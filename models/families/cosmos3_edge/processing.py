"""Input processing of Cosmos 3 Edge: native resolution; a timestamp before each frame of a video.

Source: transformers' processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..qwen3_vl.processing import PATCHES, Qwen3VLProcessingInfo

_PATCHES = replace(PATCHES, temporal=1, bounds_all_frames=True)


class Cosmos3EdgeProcessingInfo(Qwen3VLProcessingInfo):
    """ProcessingInfo of Cosmos 3 Edge. The tokens around a video's placeholder give way to those around each frame."""

    element_format = ""
    placeholders = {"image": ("image_token_id", 19), "video": ("video_token_id", 18)}
    placeholder_texts = {"video": "<|vision_start|><|video_pad|><|vision_end|>"}
    text_config_defaults = {"hidden_size": 2048, "vocab_size": 131072}
    patch_specs = {
        "image": replace(_PATCHES, min_pixels=256 * 256, max_pixels=4096 * 4096),
        "video": replace(_PATCHES, min_pixels=64 * 64, max_pixels=24 << 20),
    }
    deepstack_layers = ()

    def resolve_token_ids(self) -> None:
        self.start = self.config_token_id("vision_start_token_id", 20)
        self.end = self.config_token_id("vision_end_token_id", 21)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Remove the tokens around each video's placeholder, unless the prompt is expanded already."""
        video = self.placeholder_ids["video"]
        if sum(token == video for token in ids) != items.get("video", 0):
            return ids
        out, wrapped = list[int](), [self.start, video, self.end]
        for token in ids:
            out.append(token)
            if out[-3:] == wrapped:
                out[-3:] = [video]
        return out

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)
