"""Image processing: resize, crop by a plan, rescale and normalize, and lay out as patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..callers.errors import ConfigError, short_repr
from ..kernels import pixels as kernel
from ..kernels.pixels.layout import Normalization, PatchLayout
from ..mm.buffers import BUFFERS
from ..mm.tiling.plan import CropPlan, Resize, Step, TiledView
from .device import MAX_TRANSFER_BYTES, media_device
from .options import check_value

OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of RGB values in 0..1
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_STANDARD_MEAN = (0.5, 0.5, 0.5)  # SigLIP
IMAGENET_STANDARD_STD = (0.5, 0.5, 0.5)
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers
_PILLOW_ONLY = ("box", "hamming")  # torch has no such filter
_WIDENED = ("lanczos", "bilinear", "bicubic")  # filters of the kernel
_NOT_WIDENED = ("bilinear", "bicubic")  # filters that torch computes without antialiasing
_STRIP_PIXELS = 1 << 17  # normalized at a time
_PILLOW = {name: Image.Resampling(number) for number, name in FILTERS.items()}


@dataclass(frozen=True)
class PixelSpec:
    """Resizing and normalization of the pixels of one modality.

    Args:
        mean, std: per channel. A normalized value is `(pixel * rescale - mean) / std`.
        filter: resizing filter: "nearest", "bilinear", "bicubic", "lanczos", "box" or "hamming". Pillow computes the last two.
        resample: library whose resizing is reproduced bit by bit: "torch" (as in today's published processors), "pillow" or,
            for the bilinear filter, "opencv", which does not antialias.
        bfloat16: pixels are rescaled and normalized in bfloat16, always on the CPU.
        antialias: the filter widens when an image shrinks. False: not, also always on the CPU.
        filters_uint8: without antialiasing, torch filters uint8 pixels, which rounds in another way than filtering in float32.
        unrounded: resized pixels are not rounded to whole numbers; only with antialiasing, by torch, always on the CPU.
    """

    mean: tuple[float, ...] = OPENAI_CLIP_MEAN
    std: tuple[float, ...] = OPENAI_CLIP_STD
    rescale: float = 1 / 255
    filter: str = "bicubic"
    resample: str = "torch"
    bfloat16: bool = False
    antialias: bool = True
    filters_uint8: bool = False
    unrounded: bool = False

    def unresized(self) -> Self:
        """Return the spec for images that keep their size (do_resize=false); ConfigError if the model needs resized ones."""
        raise ConfigError(
            "do_resize is false in the preprocessor JSON, but this model cuts resized images only; set it to true"
        )


Spec = TypeVar("Spec", bound=PixelSpec)


def read_pixel_spec(json: Mapping[str, Any], default: Spec, options: Mapping[str, Any]) -> Spec:
    """Return the spec with the values of a preprocessor's JSON and the caller's `resample`; missing keys keep the default.

    Raises:
        ConfigError: the filter or `resample` is unknown, or they do not go together; there are neither one nor three means; a
            mean is not a number, or a factor or deviation is not a number above zero.
    """
    filter_numbers = {name: number for number, name in FILTERS.items()}
    number = json.get("resample", filter_numbers[default.filter])
    if isinstance(number, bool) or number not in FILTERS:
        offered = ", ".join(f"{name} ({meaning})" for meaning, name in FILTERS.items())
        raise ConfigError(f"resample in the preprocessor JSON is {short_repr(number)}; known are {offered}")
    if (FILTERS[number] not in _WIDENED and default.unrounded) or (
        FILTERS[number] not in _NOT_WIDENED and not default.antialias
    ):
        raise ConfigError(
            f"resample in the preprocessor JSON is {number}, which torch does not compute for this model; give 2 or 3"
        )
    spec = default if json.get("do_resize", True) else default.unresized()
    spec = replace(
        spec,
        filter=FILTERS[number],
        resample="pillow" if FILTERS[number] in _PILLOW_ONLY else spec.resample,
    )
    normalise, factor = json.get("do_normalize", True), json.get("rescale_factor", default.rescale)
    return replace(
        apply_resample(spec, options),
        mean=_channels(json, "image_mean", default.mean) if normalise else (0.0, 0.0, 0.0),
        std=_divisors("image_std", _channels(json, "image_std", default.std)) if normalise else (1.0, 1.0, 1.0),
        rescale=_divisors("rescale_factor", (factor,))[0] if json.get("do_rescale", True) else 1.0,
    )


def apply_resample(spec: Spec, options: Mapping[str, Any]) -> Spec:
    """Return the spec with the caller's `resample`; ConfigError unless it is torch or pillow, and has the spec's filter."""
    if "resample" not in options:
        return spec
    resample = options["resample"]
    check_value("resample", resample)
    if resample != "pillow" and spec.filter in _PILLOW_ONLY:
        reason = f"resample is {resample!r}, which has no {spec.filter} filter, but the preprocessor JSON asks for it"
        raise ConfigError(f"{reason}; give 'pillow', or leave it out", param="resample")
    return replace(spec, resample=resample)


def crops(frames: Tensor, plan: CropPlan, spec: PixelSpec) -> Iterator[Tensor]:
    """Yield the crops of uint8 `[n, h, w, 3]` by a plan, each `[n, 3, height, width]` as `resize` returns it.

    If several views begin with the same steps, these are computed once.
    """
    done: dict[tuple[Step, ...], Tensor] = {(): frames.permute(0, 3, 1, 2)}
    for view in plan.views:
        for end in range(1, len(view.steps) + 1):
            if view.steps[:end] not in done:
                done[view.steps[:end]] = _apply_step(done[view.steps[: end - 1]], view.steps[end - 1], spec)
        whole, (tall, wide) = done[view.steps], view.tile_size
        for row in range(view.rows):
            for column in range(view.columns):
                yield whole[:, :, row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]


def patchify_crops(
    frames: Tensor,
    plan: CropPlan,
    spec: PixelSpec,
    layout: PatchLayout,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the normalized patches of all crops of uint8 `[n, h, w, 3]`: `[patches, 3 * temporal * patch * patch]` in `dtype`.

    `layout.temporal` frames make one patch; the last frame is repeated to fill the last group. Patches are ordered by group of
    frames, by crop, by merge x merge square in row-major order, and within a square. The numbers of a patch are in the order
    of a convolution's weight (channel, frame, row, column). Pixels right of and below the last full square are not used.
    Images that Pillow resizes, and images that are too large for a transfer, are processed on the CPU even if there is a
    media device.
    """
    patch, merge, temporal = layout.patch, layout.merge, layout.temporal
    side, device = patch * merge, media_device()
    tall, wide = (edge // side for edge in plan.views[0].tile_size)
    groups = -(-len(frames) // temporal)
    out = BUFFERS.take((groups, plan.num_tiles, tall, wide, merge, merge, 3, temporal, patch, patch), dtype)
    small = max(frames[:temporal].nbytes, out[:1].nbytes) <= MAX_TRANSFER_BYTES
    on_device = (
        spec.resample == "torch" and spec.antialias and spec.filter in _WIDENED and not (spec.bfloat16 or spec.unrounded)
    )
    if device is not None and small and on_device:
        used = (tall * side, wide * side)
        groups_at_once = max(1, MAX_TRANSFER_BYTES // max(1, frames[:temporal].nbytes, out[:1].nbytes))
        parts = zip(frames.split(groups_at_once * temporal), out.split(groups_at_once), strict=True)
        device.fill(parts, lambda part: _process_on_device(part, plan, spec, used, layout, dtype))
    else:
        normalize = _normalizer(spec)
        for group, rows in zip(frames.split(temporal), out, strict=True):
            if 1 < len(group) < temporal:
                group = torch.cat([group, group[-1:].expand(temporal - len(group), -1, -1, -1)])
            for index, piece in enumerate(crops(group, plan, spec)):
                _fill_patches(rows[index], piece[:, :, : tall * side, : wide * side], normalize)
    return out.view(-1, 3 * temporal * patch * patch)


def patchify_overview(pixels: Tensor, side: int, spec: PixelSpec, patch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the patches of an image that is normalized first and then resized to `side` x `side` pixels.

    uint8 `[1, 3, h, w]` -> `[patches, 3 * patch * patch]`, row by row. The filter is bicubic without antialiasing, on the CPU.
    """
    plane = F.interpolate(_normalizer(spec)(pixels).float(), (side, side), mode="bicubic")
    squares = plane.view(3, side // patch, patch, side // patch, patch)
    return squares.permute(1, 3, 0, 2, 4).reshape(-1, 3 * patch**2).to(dtype)


def resize(pixels: Tensor, target: tuple[int, int], spec: PixelSpec) -> Tensor:
    """Resize uint8 `[n, 3, h, w]` to the target (height, width), in any memory layout. float32 if `unrounded`, else uint8."""
    if tuple(pixels.shape[-2:]) == target:
        return pixels
    if spec.unrounded:
        return F.interpolate(pixels.float(), target, mode=spec.filter, antialias=True)
    if not spec.antialias:
        if spec.filters_uint8:
            return F.interpolate(pixels, target, mode=spec.filter, align_corners=False)
        return torch.cat([_resize_exactly(image, target, spec.filter) for image in pixels.split(1)])
    if spec.resample == "torch" and spec.filter == "nearest":
        return F.interpolate(pixels, target, mode="nearest-exact")
    if spec.resample == "torch":
        return kernel.resize(pixels.permute(0, 2, 3, 1), target, spec.filter)
    if spec.resample == "opencv":
        return _resize_as_opencv(pixels, target)
    kind, size = _PILLOW[spec.filter], (target[1], target[0])
    images = [
        np.asarray(Image.fromarray(image.numpy()).resize(size, kind)) for image in pixels.permute(0, 2, 3, 1).contiguous()
    ]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _resize_exactly(pixels: Tensor, target: tuple[int, int], filter: str) -> Tensor:
    """Resize uint8 `[1, 3, h, w]` in float32, without antialiasing. The memory layout decides how torch rounds."""
    exact = F.interpolate(pixels.float(), target, mode=filter, align_corners=False)
    return exact.round_().clamp_(0, 255).to(torch.uint8)


def _resize_as_opencv(pixels: Tensor, target: tuple[int, int]) -> Tensor:
    import cv2

    frames = pixels.permute(0, 2, 3, 1).contiguous().numpy()
    resized = np.stack([cv2.resize(frame, (target[1], target[0]), interpolation=cv2.INTER_LINEAR) for frame in frames])
    return torch.from_numpy(resized).permute(0, 3, 1, 2)


def _normalizer(spec: PixelSpec) -> Callable[[Tensor], Tensor]:
    """Return the function that normalizes pixels 0..255 `[n, 3, h, w]` to float32 (or bfloat16)."""
    scaling = _scaling(spec)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (scaling.mean, scaling.std))
    if not spec.bfloat16:
        return lambda pixels: pixels.to(torch.float32, copy=True).sub_(mean).div_(std)
    rounded = [torch.tensor(values, dtype=torch.bfloat16).view(1, 3, 1, 1) for values in (spec.mean, spec.std)]
    return lambda pixels: (pixels.to(torch.bfloat16) * spec.rescale).sub_(rounded[0]).div_(rounded[1])


def _fill_patches(rows: Tensor, pixels: Tensor, normalize: Callable[[Tensor], Tensor]) -> None:
    """Normalize uint8 `[n, 3, h * m * p, w * m * p]` into `rows` `[h, w, m, m, 3, temporal, p, p]` of merged patches.

    Works in strips that fit a core's cache, so the image never exists in floating point. The operations and their order are
    those of the published processors, so the result is bit-equal.
    """
    m, p = rows.shape[2], rows.shape[-1]
    side = m * p
    lines = max(1, _STRIP_PIXELS // pixels[:, :, :side].numel())  # lines of merged patches per strip
    for start in range(0, len(rows), lines):
        part = rows[start : start + lines]
        strip = normalize(pixels[:, :, start * side : (start + len(part)) * side].contiguous())
        blocks = strip.view(len(strip), 3, len(part), m, p, -1, m, p)
        part.copy_(blocks.permute(2, 5, 3, 6, 1, 0, 4, 7))  # an image is broadcast over the frames of its patch


def _process_on_device(
    frames: Tensor, plan: CropPlan, spec: PixelSpec, used: tuple[int, int], layout: PatchLayout, dtype: torch.dtype
) -> Tensor:
    """Do `patchify_crops` on a device. The result may have any shape. `used`: (height, width) of a crop that patches cover."""
    scaling = _scaling(spec)
    if plan.views == (TiledView((Resize.to(used),)),):  # one kernel resizes and lays out
        return kernel.preprocess_frames(frames, used, spec.filter, scaling, layout, dtype)
    pieces = [piece[:, :, : used[0], : used[1]].permute(0, 2, 3, 1) for piece in crops(frames, plan, spec)]
    groups = -(-len(frames) // layout.temporal)
    rows = [kernel.preprocess_frames(piece, used, spec.filter, scaling, layout, dtype).view(groups, -1) for piece in pieces]
    return torch.stack(rows, 1)


def _scaling(spec: PixelSpec) -> Normalization:
    """Return mean and deviation in units of a pixel, rounded to float32 as in the published processors."""
    mean, std = ((torch.tensor(values) * (1.0 / spec.rescale)).tolist() for values in (spec.mean, spec.std))
    return Normalization(tuple(mean), tuple(std))


def _apply_step(pixels: Tensor, step: Step, spec: PixelSpec) -> Tensor:
    if isinstance(step, Resize):
        return resize(pixels, (step.height, step.width), spec)
    rows, to_rows = _overlap(step.top, step.height, pixels.shape[2])
    columns, to_columns = _overlap(step.left, step.width, pixels.shape[3])
    inside = pixels[:, :, rows, columns]
    if inside.shape[2:] == (step.height, step.width):
        return inside
    fill = pixels.new_tensor(step.fill).view(1, 3, 1, 1)
    out = fill.expand(len(pixels), 3, step.height, step.width).contiguous()
    out[:, :, to_rows, to_columns] = inside
    return out


def _overlap(start: int, length: int, side: int) -> tuple[slice, slice]:
    """Return the part of `[start, start + length)` inside `[0, side)`, as a slice of the side and as a slice of the range."""
    first = max(0, start)
    last = max(first, min(start + length, side))
    return slice(first, last), slice(first - start, last - start)


def _channels(json: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    stated = json.get(key)
    if stated is None or stated == []:
        return default
    values = tuple(stated) if isinstance(stated, list | tuple) else (stated,)
    _check_numbers(key, values)
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3:
        raise ConfigError(f"{key} in the preprocessor JSON has {len(values)} numbers; images have 3 channels")
    return values


def _divisors(key: str, values: tuple[float, ...]) -> tuple[float, ...]:
    _check_numbers(key, values)
    if not all(value > 0 for value in values):
        raise ConfigError(f"{key} in the preprocessor JSON is {', '.join(map(str, values))}; it must be above zero")
    return values


def _check_numbers(key: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{key} in the preprocessor JSON is {short_repr(value)}; give numbers")
