"""Flat patches of images and frames at their native resolution, and the options that bound their area."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..callers.errors import ConfigError
from ..kernels.pixels.layout import PatchLayout
from ..mm.geometry import ResizePolicy
from ..mm.tiling.plan import CropPlan, Resize, TiledView
from ..mm.types import ItemGeometry
from .images import PixelSpec, apply_resample, patchify_crops, read_pixel_spec
from .options import is_low_detail

LOW_DETAIL = 512 * 512  # pixels, as detail="low" means in OpenAI's interface
_MAX_AREA = 1 << 48  # pixels that an option may ask for; the rows of an item bound it further
_SIZE_KEYS = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}


@dataclass(frozen=True)
class PatchSpec(PixelSpec):
    """Parameters for cutting one modality into patches. Sides and areas are in pixels; a patch covers `temporal` frames.

    `max_video_pixels`: bound on the area of a frame times the temporal patches of its video; None: no bound.
    `bounds_all_frames`: the area bounds apply to all frames of an item together (an image counts as one temporal patch), and
    `max_video_pixels` to one frame. `upscale_short_sides`: enlarge sides shorter than a merged patch to one.
    `squeeze`: as in ResizePolicy.
    `resized`: (height, width) that takes the place of an item's own size.
    `can_keep_size`: do_resize may be false in the preprocessor's JSON. Then `keeps_size`: images and frames are not resized, so
    their sides must be multiples of a merged patch.
    """

    patch: int = 14
    merge: int = 2
    temporal: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    max_video_pixels: int | None = None
    bounds_all_frames: bool = False
    upscale_short_sides: bool = False
    squeeze: bool = False
    resized: tuple[int, int] | None = None
    can_keep_size: bool = False
    keeps_size: bool = False

    def unresized(self) -> Self:
        return replace(self, keeps_size=True) if self.can_keep_size else super().unresized()

    def policy(self, frames: int = 1) -> ResizePolicy:
        """Return the resize policy of an item with this many frames."""
        if self.keeps_size:
            return ResizePolicy(self.patch * self.merge, 1, _MAX_AREA)
        most = self.max_pixels
        if self.bounds_all_frames:
            frames = max(frames, self.temporal)
            if self.max_video_pixels is not None:
                most = max(min(self.max_video_pixels, most // frames), int(self.min_pixels * 1.05)) * frames
            counted = round(frames / self.temporal) * self.temporal
            factor = self.patch * self.merge
            return ResizePolicy(factor, self.min_pixels, most, frames=frames, counted=counted, scale_short_sides=True)
        if self.max_video_pixels is not None:
            most = max(min(most, self.max_video_pixels * self.temporal // frames), int(self.min_pixels * 1.05))
        factor, enlarge = self.patch * self.merge, self.upscale_short_sides
        return ResizePolicy(factor, self.min_pixels, most, enlarge=enlarge, squeeze=self.squeeze)


def read_patch_spec(json: Mapping[str, Any], default: PatchSpec) -> PatchSpec:
    """Return a PatchSpec from a preprocessor's JSON; missing keys keep the default.

    The area bounds are `min_pixels` and `max_pixels`, or else `shortest_edge` and `longest_edge` (or `min_pixels` and
    `max_pixels`) inside `size`, as in the published processors.

    Raises:
        ConfigError: resizing is switched off and the model needs it, or the filter is not supported.
    """
    options = {key: value for key, value in json.items() if key != "resample"}  # in the JSON, `resample` is the filter
    spec = replace(
        read_pixel_spec(json, apply_size(default, options), {}),
        patch=json.get("patch_size", default.patch),
        merge=json.get("merge_size", default.merge),
        temporal=json.get("temporal_patch_size", default.temporal),
    )
    if not json.get("cap_pixels_per_frame"):
        return spec
    factor = (spec.patch * spec.merge) ** 2
    if spec.bounds_all_frames:
        return replace(spec, max_video_pixels=json.get("max_video_tokens", 768) * factor)
    return replace(spec, max_video_pixels=int(json.get("max_video_tokens", 128_000) * factor * 0.9))


def apply_size(spec: PatchSpec, options: Mapping[str, Any]) -> PatchSpec:
    """Return the spec with the area bounds of `options`, in any published form; ConfigError if they contradict each other.

    If only one bound is given and crosses the default of the other, the other moves with it. `detail="low"` caps the area at
    512x512 pixels; "high" and "auto" keep the model's limits.
    """
    if is_low_detail(options):
        spec = replace(spec, min_pixels=min(spec.min_pixels, LOW_DETAIL), max_pixels=min(spec.max_pixels, LOW_DETAIL))
    size = options.get("size") or {}
    if not isinstance(size, Mapping) or not size.keys() <= _SIZE_KEYS:
        raise ConfigError(f"size may hold {', '.join(sorted(_SIZE_KEYS))} only (areas in pixels), not {size}")
    least = _first(options.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels"))
    most = _first(options.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels"))
    for name, area in (("min_pixels", least), ("max_pixels", most)):
        if area is not None and (isinstance(area, bool) or not isinstance(area, int) or area < 1):
            raise ConfigError(f"{name} is {area!r}; give a positive integer, in pixels")
        if area is not None and area > _MAX_AREA:
            raise ConfigError(f"{name} is over the limit of {_MAX_AREA:,} pixels; give less")
    if least is None:
        least = min(spec.min_pixels, most or spec.min_pixels)
    if most is None:
        most = max(spec.max_pixels, least)
    if least > most:
        raise ConfigError(f"min_pixels is {least} and max_pixels is {most}; the first must not be larger")
    total = options.get("total_pixels")
    if total is not None and spec.bounds_all_frames:
        most = max(least, min(most, total * spec.temporal))
    elif total is not None:
        spec = replace(spec, max_video_pixels=total)
    height, width = options.get("resized_height"), options.get("resized_width")
    if height is not None and width is not None:
        spec = replace(spec, resized=(height, width))
    elif height is not None or width is not None:
        raise ConfigError("resized_height and resized_width belong together; give both", param="resized_height")
    return replace(apply_resample(spec, options), min_pixels=least, max_pixels=most)


def patchify(frames: Tensor, geometry: ItemGeometry, spec: PatchSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """Cut uint8 `[n, h, w, 3]` into `[patches, 3 * temporal * patch * patch]` in `dtype`; merged patches are adjacent."""
    whole = TiledView((Resize(geometry.h * spec.patch, geometry.w * spec.patch),))
    return patchify_crops(frames, CropPlan((whole,)), spec, PatchLayout(spec.patch, spec.merge, spec.temporal), dtype)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
