"""Input processing of Keye-VL and Keye-VL-1.5: images and videos at native resolution; 1.5 has slow and fast frames.

Source: the publisher's processors and `keye_vl_utils`, which samples and resizes the frames of videos (Kwai-Keye on GitHub).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...mm.errors import InputError
from ...mm.fields import BatchedField, FieldElem, FlatField
from ...mm.geometry import FrameSampling, ResizePolicy, patch_grid, smart_resize
from ...mm.media.policy import DecodeSpec
from ...mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ..bases.native import IMAGE_AND_VIDEO_KWARGS, NativeResolutionInfo
from ..interface import Span
from ..patches import PatchSpec, patchify
from ..spans import Piece, build_span

_PIXELS_PER_ROW = 28 * 28
_MIN_PIXELS, _MAX_PIXELS = 48 * _PIXELS_PER_ROW, 768 * _PIXELS_PER_ROW  # of a frame of Keye-VL-1.5
_FAST_RATIO = 0.3  # rows of a fast frame per row of a slow frame
_FRAMES = 2  # Keye-VL samples a multiple of this
_IMAGE_KEYS = ("max_pixels", "min_pixels", "resample", "size")


class KeyeProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of Keye-VL. Videos have their own bounds, and temporal positions that follow their seconds."""

    element_format = "box_tokens"
    placeholders = {"image": ("image_token_id", 151655), "video": ("video_token_id", 151656)}
    text_config_defaults = {"vocab_size": 152064, "hidden_size": 8192}
    patch_specs = {
        "image": PatchSpec(temporal=1, upscale_short_sides=True),
        "video": PatchSpec(
            temporal=1,
            min_pixels=128 * _PIXELS_PER_ROW,
            max_pixels=_MAX_PIXELS,
            max_video_pixels=int(128000 * _PIXELS_PER_ROW * 0.9),
        ),
    }
    default_kwargs = {"images_kwargs": {"resample": "pillow"}}
    frame_sampling = FrameSampling(fps=2.0, min_frames=4, max_frames=768, spread="nearest")

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON. If videos share that of images, their size and filter are those of `keye_vl_utils`."""
        json = super().preprocessor_json(modality)
        shared = modality == "video" and not self.files.video
        return {key: value for key, value in json.items() if not (shared and key in _IMAGE_KEYS)}

    def resolve_spec(self, modality: str) -> PatchSpec:
        """Return the spec. The bound on all frames counts every second frame."""
        spec = super().resolve_spec(modality)
        most = spec.max_video_pixels
        return spec if most is None else replace(spec, max_video_pixels=_FRAMES * most)

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec(replace(super().resolve_decode_spec().sampling, multiple=_FRAMES))

    def time_step(self, fps: float) -> float:
        """Return `tokens_per_second` times the seconds between two frames."""
        return self.tokens_per_second(2) / fps


@dataclass(frozen=True)
class SlowFastSpec(PatchSpec):
    """A PatchSpec of videos. `frame_types`: for each used frame 0 (slow) or 1 (fast); empty: all frames are slow.

    `max_video_pixels` is the most pixels of all frames together; fast frames have `_FAST_RATIO` of the rows of slow ones.
    """

    frame_types: tuple[int, ...] = ()

    def sides(self, size: tuple[int, int], frames: int) -> tuple[ResizePolicy, ResizePolicy]:
        """Return the policies of slow and of fast frames of `size` (height, width), of which there are `frames` in all."""
        factor, fast = self.patch * self.merge, sum(self.frame_types)
        row = factor**2
        total = self.max_video_pixels or row * self.max_pixels * frames
        least, low, high = int(self.min_pixels / row), self.min_pixels / row, self.max_pixels / row
        while low < high:  # the published search, which may exceed the total by a row per frame
            middle = int(low + high) // 2
            if ((frames - fast) * middle + fast * max(int(_FAST_RATIO * middle), least)) * row > total:
                high = middle
            else:
                low = middle + 1
        slow = ResizePolicy(factor, self.min_pixels, int(low * row))
        tall, wide = smart_resize(*size, slow)
        most = max(int(tall * wide / row * _FAST_RATIO) * row, min(self.min_pixels, _MIN_PIXELS))
        return slow, replace(slow, max_pixels=most)


class Keye15ProcessingInfo(KeyeProcessingInfo):
    """ProcessingInfo of Keye-VL-1.5. Each frame is a token, its seconds as text, and its rows; tokens surround fast frames.

    The option `frame_types` says which frames are fast. `keye_vl_utils` finds them by comparing the decoded frames.
    """

    valid_kwargs = {**IMAGE_AND_VIDEO_KWARGS, "video": (*IMAGE_AND_VIDEO_KWARGS["video"], "frame_types")}
    patch_specs = {
        "image": replace(KeyeProcessingInfo.patch_specs["image"], filter="bilinear"),
        "video": SlowFastSpec(
            temporal=1,
            filter="bilinear",
            min_pixels=_MIN_PIXELS,
            max_pixels=_MAX_PIXELS,
            max_video_pixels=65536 * _PIXELS_PER_ROW,
        ),
    }
    frame_sampling = FrameSampling(fps=2.0, max_frames=65536 // 48, spread="nearest")
    timestamp_position = 0.0

    def resolve_token_ids(self) -> None:
        self.frame, self.fast_start, self.fast_end = (
            self.special_token_id(text) for text in ("<|frame|>", "<|fast_start|>", "<|fast_end|>")
        )

    def resolve_spec(self, modality: str) -> PatchSpec:
        spec = NativeResolutionInfo.resolve_spec(self, modality)
        types = self.merged_kwargs[modality].get("frame_types")
        if types is None:
            return spec
        assert isinstance(spec, SlowFastSpec)
        return replace(spec, frame_types=tuple(types))

    def resolve_decode_spec(self) -> DecodeSpec:
        return NativeResolutionInfo.resolve_decode_spec(self)

    def time_step(self, fps: float) -> float:
        return 1.0

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        spec = self.specs[header.modality]
        if header.frames is None or not isinstance(spec, SlowFastSpec):
            return super().geometry(header)
        times, types = header.frames.timestamps, spec.frame_types
        if types and len(types) != len(times):
            reason = f"frame_types has {len(types)} entries, but {len(times)} frames are used; give one entry per frame"
            raise InputError(reason, param="frame_types")
        size = spec.resized or header.size
        slow, fast = (patch_grid(size, policy, spec.merge, len(times)) for policy in spec.sides(size, len(times)))
        sides = tuple((one.h, one.w) for one in (fast if kind else slow for kind in types))
        h, w = sides[0] if sides else (slow.h, slow.w)
        return replace(slow, h=h, w=w, times=times, sides=sides)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        types = self.specs["video"].frame_types if geometry.sides else (0,) * geometry.t
        steps = geometry.steps or [replace(geometry, t=1)] * geometry.t
        pieces: list[Piece] = []
        for seconds, fast, step in zip(geometry.times, types, steps, strict=True):
            start, end = ((self.fast_start,), (self.fast_end,)) if fast else ((), ())
            pieces += [(self.frame, *self.encode(f"{np.float32(seconds):.1f}"), *start), step.num_embeds, end]
        return build_span(pieces, self.placeholder_ids["video"])

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors of the base. A video with `frame_types` has a grid `[frames, 3]` and `num_frames`."""
        grid = self.geometry(item.header)
        if not isinstance(item, VideoItem) or not grid.sides:
            return super().process(item, dtype)
        frames = zip(item.frames.split(1), grid.steps, strict=True)
        patches = torch.cat([patchify(frame, step, self.specs["video"], dtype) for frame, step in frames])
        grids = torch.tensor([(1, h, w) for h, w in grid.sides])
        return {
            "pixel_values_videos": FieldElem(patches, FlatField()),
            "video_grid_thw": FieldElem(grids, FlatField(keep_on_cpu=True)),
            "num_frames": FieldElem(torch.tensor(grid.t), BatchedField(keep_on_cpu=True)),
        }, grid

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return smaller options as the base does, but None if frames that `frame_types` names would be dropped."""
        kwargs = super().shrink_kwargs(modality, grid, rows)
        dropped = kwargs is not None and "num_frames" in kwargs and modality == "video"
        return None if dropped and self.specs["video"].frame_types else kwargs
