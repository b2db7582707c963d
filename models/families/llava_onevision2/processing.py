"""Input processing of LLaVA-OneVision-2: images and frames at native resolution, the seconds of each frame before it.

Sources: the publisher's processors (EvolvingLMMs-Lab/LLaVA-OneVision-2 on GitHub); vLLM's llava_onevision2.py, which pads
videos to an even number of frames and gives all frames the number 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....mm.fields import FieldElem, FlatField
from ....mm.geometry import FrameSampling
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem, VideoItem
from ....processors.bases.native import NativeResolutionInfo
from ....processors.interface import Span
from ....processors.patches import PatchSpec
from ....processors.spans import Piece, build_span

_FRAMES = FrameSampling(max_frames=384, spread="nearest", frames_by_duration=((10.0, 8), (30.0, 16)))


class LlavaOnevision2ProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of LLaVA-OneVision-2. Each frame of a video is its seconds as text, then an image."""

    can_keep_sizes = True
    rewrites_prompts = True
    placeholders = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656)}
    text_config_defaults = {"vocab_size": 151936, "hidden_size": 4096}
    patch_specs = {modality: PatchSpec(temporal=1) for modality in ("image", "video")}
    frame_sampling = _FRAMES
    timestamp_position = 0.0

    def resolve_token_ids(self) -> None:
        self.start = self.config_token_id("vision_start_token_id", 151652)
        self.end = self.config_token_id("vision_end_token_id", 151653)

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON of images: frames are processed as these are."""
        return self.files.image

    def resolve_spec(self, modality: str) -> PatchSpec:
        spec = super().resolve_spec(modality)
        if spec.temporal != 1:
            raise ConfigError(
                f"temporal_patch_size in the preprocessor JSON is {spec.temporal}; a patch of this model has 1 frame"
            )
        return spec

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Remove start and end around the placeholder of a video: each of its frames has its own."""
        if not items.get("video"):
            return ids
        around, kept = [self.start, self.placeholder_ids["video"], self.end], list[int]()
        for token in ids:
            kept.append(token)
            if kept[-3:] == around:
                kept[-3:] = around[1:2]
        return kept

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        rows, pieces = geometry.num_embeds // geometry.t, list[Piece]()
        for seconds in geometry.times:
            pieces += [(*self.encode(f"<{seconds:.1f} seconds>"), self.start), rows, (self.end,)]
        return build_span(pieces, self.placeholder_ids["image"])

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors of the base. A video has `frame_numbers`, int64 `[frames]`: those of its frames in the source."""
        tensors, grid = super().process(item, dtype)
        if not isinstance(item, VideoItem):
            return tensors, grid
        assert item.header.frames is not None
        numbers = torch.tensor(item.header.frames.indices)
        return {**tensors, "frame_numbers": FieldElem(numbers, FlatField(keep_on_cpu=True))}, grid
