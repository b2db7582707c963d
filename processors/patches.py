"""Pixels to patches, shared by the families that feed flat patches: resize, cut, scale. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..mm.errors import ConfigError
from ..mm.geometry import ResizePolicy
from ..mm.tiling import CropPlan, Resize, View
from ..mm.types import ItemGeometry
from .pictures import PixelSpec, patch_rows, read_pixels, with_resample

LOW_DETAIL = 512 * 512  # pixels, as detail="low" means in OpenAI's interface
_LARGEST = 1 << 48  # pixels that an option may ask for; what an item may really take is bounded by its rows
_SIZE_KEYS = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}


@dataclass(frozen=True)
class PatchSpec(PixelSpec):
    """How one modality is cut: sides in pixels, areas in pixels, `temporal` frames per patch.

    `clip_pixels`: where set, an upper bound on the pixels of all frames of a clip together, per temporal patch.
    `together`: the areas are of all frames of an item together (a picture is one temporal patch of them); `clip_pixels` is
    then one frame's. `enlarge`: sides shorter than a merged patch are enlarged to one first.
    """

    patch: int = 14
    merge: int = 2
    temporal: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    clip_pixels: int | None = None
    together: bool = False
    enlarge: bool = False

    def policy(self, frames: int = 1) -> ResizePolicy:
        """What the pictures of an item of `frames` frames are resized by."""
        most = self.max_pixels
        if self.together:
            frames = max(frames, self.temporal)
            if self.clip_pixels is not None:
                most = max(min(self.clip_pixels, most // frames), int(self.min_pixels * 1.05)) * frames
            counted = round(frames / self.temporal) * self.temporal
            return ResizePolicy(self.patch * self.merge, self.min_pixels, most, frames=frames, counted=counted)
        if self.clip_pixels is not None:
            most = max(min(most, self.clip_pixels * self.temporal // frames), int(self.min_pixels * 1.05))
        return ResizePolicy(self.patch * self.merge, self.min_pixels, most, enlarge=self.enlarge)


def read_spec(json: Mapping[str, Any], default: PatchSpec) -> PatchSpec:
    """A PatchSpec from a preprocessor's JSON; keys it lacks keep the default.

    Areas come as `min_pixels`/`max_pixels`, or as `size` with `shortest_edge`/`longest_edge` (or the same two
    names); the former win, as in the published processors.

    Raises:
        ConfigError: a step switched off or a filter that is not offered.
    """
    sized = with_size(default, {key: value for key, value in json.items() if key != "resample"})  # there it is the filter
    spec = replace(
        read_pixels(json, sized),
        patch=json.get("patch_size", default.patch),
        merge=json.get("merge_size", default.merge),
        temporal=json.get("temporal_patch_size", default.temporal),
    )
    if not json.get("cap_pixels_per_frame"):
        return spec
    factor = (spec.patch * spec.merge) ** 2
    if spec.together:
        return replace(spec, clip_pixels=json.get("max_video_tokens", 768) * factor)
    return replace(spec, clip_pixels=int(json.get("max_video_tokens", 128_000) * factor * 0.9))


def with_size(spec: PatchSpec, options: Mapping[str, Any]) -> PatchSpec:
    """The spec with the areas that `options` give, in any of the published forms; ConfigError when they contradict.

    A bound given alone takes the other one with it where they would cross. `detail="low"` caps the area at 512x512
    pixels; "high" and "auto" leave the model's own limits.
    """
    detail = options.get("detail", "auto")
    if detail not in ("auto", "high", "low"):
        raise ConfigError(f"detail is {detail!r}; the known ones are auto, high and low")
    if detail == "low":
        spec = replace(spec, min_pixels=min(spec.min_pixels, LOW_DETAIL), max_pixels=min(spec.max_pixels, LOW_DETAIL))
    size = options.get("size") or {}
    if not isinstance(size, Mapping) or not size.keys() <= _SIZE_KEYS:
        raise ConfigError(f"size holds {', '.join(sorted(_SIZE_KEYS))} (areas in pixels), not {size}")
    least = _first(options.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels"))
    most = _first(options.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels"))
    for name, area in (("min_pixels", least), ("max_pixels", most)):
        if area is not None and (isinstance(area, bool) or not isinstance(area, int) or area < 1):
            raise ConfigError(f"{name} is {area!r}; an area is a positive whole number of pixels")
        if area is not None and area > _LARGEST:
            raise ConfigError(f"{name} is over the limit of {_LARGEST:,} pixels; give less")
    if least is None:
        least = min(spec.min_pixels, most or spec.min_pixels)
    if most is None:
        most = max(spec.max_pixels, least)
    if least > most:
        raise ConfigError(f"min_pixels is {least} and max_pixels is {most}; they must be in order")
    return replace(with_resample(spec, options), min_pixels=least, max_pixels=most)


def patchify(frames: Tensor, geometry: ItemGeometry, spec: PatchSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 `[n, h, w, 3]` to `[patches, 3 * temporal * patch * patch]` in `dtype`, merged neighbours side by side."""
    whole = View((Resize(geometry.h * spec.patch, geometry.w * spec.patch),))
    return patch_rows(frames, CropPlan((whole,)), spec, spec.patch, spec.merge, dtype, spec.temporal)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
