"""Input processing of Qwen3-VL and Qwen3.5: native resolution; a timestamp before each temporal step of a video."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ....callers.errors import InputError
from ....mm.geometry import FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.native import NativeResolutionInfo
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from ....processors.interface import Span
from ....processors.patches import PatchSpec
from ....processors.spans import Piece, build_span

MAX_FRAMES = 2048  # frames of one video
PATCHES = PatchSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patch=16)
DEEPSTACK_LAYERS = (8, 16, 24)
_PIXELS_PER_ROW = 32 * 32


class Qwen3VLProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of Qwen3-VL. Each temporal step of a video is its timestamp as text, a start token, rows, an end token."""

    element_format = "box_tokens"
    can_keep_sizes = True
    placeholders = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656)}
    patch_specs = {
        "image": replace(PATCHES, min_pixels=64 * _PIXELS_PER_ROW, max_pixels=16384 * _PIXELS_PER_ROW),
        "video": replace(PATCHES, min_pixels=128 * _PIXELS_PER_ROW, max_pixels=768 * _PIXELS_PER_ROW, bounds_all_frames=True),
    }
    frame_sampling = FrameSampling(fps=2.0, min_frames=4, max_frames=768, spread="nearest")
    timestamp_position = 0.5
    deepstack_layers: ClassVar[tuple[int, ...]] = DEEPSTACK_LAYERS

    def resolve_token_ids(self) -> None:
        self.start = self.config_token_id("vision_start_token_id", 151652)
        self.end = self.config_token_id("vision_end_token_id", 151653)

    def resolve_decode_spec(self) -> DecodeSpec:
        """Sample any number of frames, not only full steps: `process` repeats the last frame to fill the last step."""
        sampling = super().resolve_decode_spec().sampling
        return DecodeSpec(replace(sampling, multiple=1, max_frames=min(sampling.max_frames, MAX_FRAMES)))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        used = 0 if header.frames is None else len(header.frames.indices)
        if used > MAX_FRAMES:
            raise InputError(
                f"{used} of its frames are requested, the limit is {MAX_FRAMES}; lower fps or num_frames",
                code="over_limit",
                limit=MAX_FRAMES,
                value=used,
            )
        return grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        rows = geometry.num_embeds // geometry.t
        pieces: list[Piece] = []
        for time in geometry.times:
            pieces += [(*self.encode(f"<{time:.1f} seconds>"), self.start), rows, (self.end,)]
        return build_span(pieces, self.placeholder_ids["video"])


class Qwen35ProcessingInfo(Qwen3VLProcessingInfo):
    """ProcessingInfo of Qwen3.5: other default token ids, no deepstack."""

    placeholders = {"image": ("image_token_id", 248056), "video": ("video_token_id", 248057)}
    deepstack_layers = ()

    def resolve_token_ids(self) -> None:
        self.start = self.config_token_id("vision_start_token_id", 248053)
        self.end = self.config_token_id("vision_end_token_id", 248054)
