"""What is done to pixels: resize, cut by a plan, scale, lay out as planes or patches. Knows no sizes and no family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..kernels import pixels as kernel
from ..kernels.pixels import Layout, Scaling
from ..mm.buffers import BUFFERS
from ..mm.errors import ConfigError
from ..mm.tiling import CropPlan, Resize, Step, View
from .device import MOST_AT_ONCE, media_device

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of RGB in 0..1, as CLIP was trained
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)  # mean and deviation as SigLIP was trained
FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
RESAMPLE = ("torch", "pillow")
_STRIP = 1 << 17  # pixels that are scaled at a time
_PILLOW = {name: Image.Resampling(number) for number, name in FILTERS.items()}


@dataclass(frozen=True)
class PixelSpec:
    """What is done to the pixels of one modality.

    Args:
        mean, std: of each channel, after `rescale`; a scaled value is `(pixel * rescale - mean) / std`.
        filter: of resizing, "bilinear", "bicubic" or "lanczos".
        resample: whose pixels resizing gives, torch's (those of the processors that models are published with today) or
            the installed Pillow's.
    """

    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    rescale: float = 1 / 255
    filter: str = "bicubic"
    resample: str = "torch"


Spec = TypeVar("Spec", bound=PixelSpec)


def read_pixels(json: Mapping[str, Any], default: Spec) -> Spec:
    """The spec with what a preprocessor's JSON says; keys it lacks keep the default.

    Raises:
        ConfigError: resizing switched off, a filter that is not offered, means of another number of channels, or a factor or
            deviation that is no number above zero.
    """
    known = {name: number for number, name in FILTERS.items()}
    number = json.get("resample", known[default.filter])
    if not json.get("do_resize", True) or number not in FILTERS:
        offered = "lanczos (1), bilinear (2) and bicubic (3)"
        raise ConfigError(f"the preprocessor JSON asks for do_resize=false or for a filter other than {offered}")
    normalise, factor = json.get("do_normalize", True), json.get("rescale_factor", default.rescale)
    return replace(
        default,
        mean=_channels(json, "image_mean", default.mean) if normalise else (0.0, 0.0, 0.0),
        std=_divisors("image_std", _channels(json, "image_std", default.std)) if normalise else (1.0, 1.0, 1.0),
        rescale=_divisors("rescale_factor", (factor,))[0] if json.get("do_rescale", True) else 1.0,
        filter=FILTERS[number],
    )


def with_resample(spec: Spec, options: Mapping[str, Any]) -> Spec:
    """The spec with the caller's `resample`; ConfigError when it is neither torch nor pillow."""
    resample = options.get("resample", spec.resample)
    if resample not in RESAMPLE:
        raise ConfigError(f"resample is {resample!r}; the known ones are {' and '.join(RESAMPLE)}")
    return replace(spec, resample=resample)


def cut(frames: Tensor, plan: CropPlan, spec: PixelSpec) -> Iterator[Tensor]:
    """The pieces of uint8 `[n, h, w, 3]` by a plan, each uint8 `[n, 3, height, width]`, in any memory layout.

    What several views do alike at their start is done once.
    """
    made: dict[tuple[Step, ...], Tensor] = {(): frames.permute(0, 3, 1, 2)}
    for view in plan.views:
        for end in range(1, len(view.steps) + 1):
            if view.steps[:end] not in made:
                made[view.steps[:end]] = _done(made[view.steps[: end - 1]], view.steps[end - 1], spec)
        whole, (tall, wide) = made[view.steps], view.piece
        for row in range(view.rows):
            for column in range(view.columns):
                yield whole[:, :, row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]


def patch_rows(
    frames: Tensor,
    plan: CropPlan,
    spec: PixelSpec,
    patch: int,
    merge: int = 1,
    dtype: torch.dtype = torch.float32,
    temporal: int = 1,
) -> Tensor:
    """uint8 `[n, h, w, 3]` to the scaled patches of all pieces, `[patches, 3 * temporal * patch * patch]` in `dtype`.

    `temporal` frames make one patch; a last group that lacks frames repeats its last one. A group's pieces lie side by
    side, a piece's patches in squares of merge x merge, row by row of squares, a patch's numbers as in the weight of a
    convolution (channel, frame, row, column). What is left of a piece on the right and below a whole number of squares
    is not used. Pictures that Pillow resizes, or that are too large, are processed here, whatever `media_device` says.
    """
    side, device = patch * merge, media_device()
    tall, wide = (edge // side for edge in plan.views[0].piece)
    groups = -(-len(frames) // temporal)
    out = BUFFERS.take((groups, plan.pieces, tall, wide, merge, merge, 3, temporal, patch, patch), dtype)
    small = max(frames[:temporal].nbytes, out[:1].nbytes) <= MOST_AT_ONCE
    if device is not None and small and spec.resample == "torch":
        layout, used = Layout(patch, merge, temporal), (tall * side, wide * side)
        some = max(1, MOST_AT_ONCE // max(1, frames[:temporal].nbytes, out[:1].nbytes))
        parts = zip(frames.split(some * temporal), out.split(some), strict=True)
        device.fill(parts, lambda part: _laid_out(part, plan, spec, used, layout, dtype))
    else:
        known = _scaling(spec)
        mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in (known.mean, known.std))
        for group, rows in zip(frames.split(temporal), out, strict=True):
            if 1 < len(group) < temporal:
                group = torch.cat([group, group[-1:].expand(temporal - len(group), -1, -1, -1)])
            for index, piece in enumerate(cut(group, plan, spec)):
                _fill_patches(rows[index], piece[:, :, : tall * side, : wide * side], mean, std)
    return out.view(-1, 3 * temporal * patch * patch)


def resized(pixels: Tensor, target: tuple[int, int], spec: PixelSpec) -> Tensor:
    """uint8 `[n, 3, h, w]` at the target size, in any memory layout."""
    if tuple(pixels.shape[-2:]) == target:
        return pixels
    if spec.resample == "torch":
        return kernel.resized(pixels.permute(0, 2, 3, 1), target, spec.filter)
    kind, size = _PILLOW[spec.filter], (target[1], target[0])
    images = [np.asarray(Image.fromarray(one.numpy()).resize(size, kind)) for one in pixels.permute(0, 2, 3, 1).contiguous()]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _fill_patches(rows: Tensor, pixels: Tensor, mean: Tensor, std: Tensor) -> None:
    """Scaled pixels into `rows` `[h, w, m, m, 3, temporal, p, p]` of merged patches, from uint8 `[n, 3, h * m * p, w * m * p]`.

    A strip at a time, which stays in the core's own cache: no picture in floating point is made. Operations are those of the
    published processors, in their order: bit for bit what they give.
    """
    m, p = rows.shape[2], rows.shape[-1]
    side = m * p
    lines = max(1, _STRIP // pixels[:, :, :side].numel())  # of merged patches
    for start in range(0, len(rows), lines):
        part = rows[start : start + lines]
        strip = pixels[:, :, start * side : (start + len(part)) * side].contiguous().to(torch.float32).sub_(mean).div_(std)
        blocks = strip.view(len(strip), 3, len(part), m, p, -1, m, p)
        part.copy_(blocks.permute(2, 5, 3, 6, 1, 0, 4, 7))  # a picture's one frame is broadcast over the temporal patch


def _laid_out(
    frames: Tensor, plan: CropPlan, spec: PixelSpec, used: tuple[int, int], layout: Layout, dtype: torch.dtype
) -> Tensor:
    """What `patch_rows` makes of frames on a device, of any shape; `used`: height and width of each piece that are."""
    known = _scaling(spec)
    if plan.views == (View((Resize(*used),)),):  # resized and laid out at once
        return kernel.laid_out(frames, used, spec.filter, known, layout, dtype)
    pieces = [piece[:, :, : used[0], : used[1]].permute(0, 2, 3, 1) for piece in cut(frames, plan, spec)]
    groups = -(-len(frames) // layout.temporal)
    rows = [kernel.laid_out(piece, used, spec.filter, known, layout, dtype).view(groups, -1) for piece in pieces]
    return torch.stack(rows, 1)


def _scaling(spec: PixelSpec) -> Scaling:
    """Means and deviations of pixels as they are, rounded to float32 as the published processors do."""
    mean, std = ((torch.tensor(one) * (1.0 / spec.rescale)).tolist() for one in (spec.mean, spec.std))
    return Scaling(tuple(mean), tuple(std))


def _done(pixels: Tensor, step: Step, spec: PixelSpec) -> Tensor:
    if isinstance(step, Resize):
        return resized(pixels, (step.height, step.width), spec)
    rows, to_rows = _overlap(step.top, step.height, pixels.shape[2])
    columns, to_columns = _overlap(step.left, step.width, pixels.shape[3])
    seen = pixels[:, :, rows, columns]
    if seen.shape[2:] == (step.height, step.width):
        return seen
    fill = pixels.new_tensor(step.fill).view(1, 3, 1, 1)
    out = fill.expand(len(pixels), 3, step.height, step.width).contiguous()
    out[:, :, to_rows, to_columns] = seen
    return out


def _overlap(start: int, length: int, side: int) -> tuple[slice, slice]:
    """The part of `[start, start + length)` that lies in `[0, side)`, there and counted from its own start."""
    first, last = max(0, start), max(0, min(start + length, side))
    return slice(first, last), slice(first - start, last - start)


def _channels(json: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = json.get(key) or default
    values = (given,) * 3 if isinstance(given, int | float) else tuple(given)
    if len(values) != 3:
        raise ConfigError(f"{key} in the preprocessor JSON has {len(values)} numbers; pictures have 3 channels")
    return values


def _divisors(key: str, values: tuple[float, ...]) -> tuple[float, ...]:
    if not all(0 < value < math.inf for value in values):
        raise ConfigError(f"{key} in the preprocessor JSON is {', '.join(map(str, values))}; it must be above zero")
    return values
