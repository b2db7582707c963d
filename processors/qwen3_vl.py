"""What Qwen3-VL is fed: pictures and clips at their own size; a clip's steps are parted by their times. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..mm.errors import InputError
from ..mm.geometry import SamplingPolicy
from ..mm.media.policy import DecodeSpec
from ..mm.types import ItemGeometry, MediaHeader
from .base import build_span
from .files import ProcessorFiles
from .interface import Span
from .native import NativeInfo
from .patches import PatchSpec
from .pictures import HALF

MOST_FRAMES = 2048  # of one clip
_AREA = 32 * 32  # pixels of an embedding


class Qwen3VLProcessingInfo(NativeInfo):
    """ProcessingInfo of Qwen3-VL. Each temporal step of a clip has marks of its own, and its time before them as text."""

    slots = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656)}
    patches = {
        "image": PatchSpec(HALF, HALF, patch=16, min_pixels=64 * _AREA, max_pixels=16384 * _AREA),
        "video": PatchSpec(HALF, HALF, patch=16, min_pixels=128 * _AREA, max_pixels=768 * _AREA, together=True),
    }
    frames = SamplingPolicy(fps=2.0, min_frames=4, max_frames=768, spread="nearest")
    timed = 0.5

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(files, *options)
        self.start, self.end = self.token("vision_start_token_id", 151652), self.token("vision_end_token_id", 151653)

    @property
    def row_width(self) -> int:
        """The first level, and those that the decoder's first layers add."""
        vision = self.files.config.get("vision_config") or {}
        return super().row_width * (1 + len(vision.get("deepstack_visual_indexes", (8, 16, 24))))

    def decoding(self) -> DecodeSpec:
        """Frames are chosen one by one; a last step that lacks one repeats it."""
        sampling = super().decoding().sampling
        return DecodeSpec(replace(sampling, multiple=1, max_frames=min(sampling.max_frames, MOST_FRAMES)))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        if header.frames is None:
            return grid
        if len(header.frames.indices) > MOST_FRAMES:
            used = len(header.frames.indices)
            raise InputError(f"{used} of its frames are wanted, the model takes at most {MOST_FRAMES}; lower fps or num_frames")
        return grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        rows = geometry.num_embeds // geometry.t
        pieces: list[tuple[int, ...] | int] = []
        for time in geometry.times:
            pieces += [(*self.encode(f"<{time:.1f} seconds>"), self.start), rows, (self.end,)]
        return build_span(pieces, self.slot_ids["video"])
