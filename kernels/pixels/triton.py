"""Image preprocessing in two Triton kernels: one resizes columns, the other resizes lines, normalises and lays out."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from ..gpu.upload import keep_alive, upload
from .layout import Normalization, PatchLayout
from .resize_weights import resize_weights

_IDENTITY = Normalization((0.0,) * 3, (1.0,) * 3)


@triton.jit
def _columns_kernel(
    frames_ptr, table_ptr, out_ptr, lines, height, width, target, taps, shift,
    frame_step, line_step, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """frames uint8 `[n, h, w, 3]` -> out uint8 `[n, 3, h, target]`; grid (tiles of lines, tiles of columns), all channels."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = x < target
    frame = (line // height).to(tl.int64)
    source = frames_ptr + (frame * frame_step + (line % height) * line_step)[:, None]
    inside = (line < lines)[:, None] & wanted[None, :]
    first = tl.load(table_ptr + x, mask=wanted, other=0)
    half = tl.full([ROWS, COLUMNS], 1, tl.int32) << (shift - 1)
    red, green, blue = half, half, half
    for tap in range(taps):
        table_ptr += target
        weight = tl.load(table_ptr + x, mask=wanted, other=0)[None, :]
        at = source + tl.minimum(first + tap, width - 1)[None, :] * 3
        red += tl.load(at, mask=inside, other=0).to(tl.int32) * weight
        green += tl.load(at + 1, mask=inside, other=0).to(tl.int32) * weight
        blue += tl.load(at + 2, mask=inside, other=0).to(tl.int32) * weight
    plane = height * target
    out = out_ptr + (frame * 3 * plane + (line % height) * target)[:, None] + x[None, :]
    tl.store(out, _rounded(red, shift).to(tl.uint8), mask=inside)
    tl.store(out + plane, _rounded(green, shift).to(tl.uint8), mask=inside)
    tl.store(out + 2 * plane, _rounded(blue, shift).to(tl.uint8), mask=inside)


@triton.jit
def _rounded(total, shift):
    return tl.minimum(tl.maximum(total >> shift, 0), 255)


@triton.jit
def _lines_kernel(
    planes_ptr, table_ptr, out_ptr, frames, height, target_height, target_width, taps, shift,
    frame_step, channel_step, line_step, column_step, out_group, out_frame, out_channel, row,
    mean_0, mean_1, mean_2, std_0, std_1, std_2,
    PATCH: tl.constexpr, MERGE: tl.constexpr, TEMPORAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """planes uint8 `[n, 3, h, w]` -> out; grid (tiles of the target, 3 channels, frames): resize lines, normalise, lay out.

    `row`: numbers of a patch row, or of a line if there are no patches.
    """
    across = tl.cdiv(target_width, COLUMNS)
    y = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    channel, frame_out = tl.program_id(1), tl.program_id(2)
    frame = tl.minimum(frame_out, frames - 1).to(tl.int64)  # the last frame is repeated
    tall, wanted = y < target_height, x < target_width
    inside = tall[:, None] & wanted[None, :]
    source = planes_ptr + frame * frame_step + channel * channel_step + (x * column_step)[None, :]
    first = tl.load(table_ptr + y, mask=tall, other=0)
    total = tl.full([ROWS, COLUMNS], 1, tl.int32) << (shift - 1)
    for tap in range(taps):
        table_ptr += target_height
        weight = tl.load(table_ptr + y, mask=tall, other=0)[:, None]
        at = source + (tl.minimum(first + tap, height - 1) * line_step)[:, None]
        total += tl.load(at, mask=inside, other=0).to(tl.int32) * weight
    mean = tl.where(channel == 0, mean_0, tl.where(channel == 1, mean_1, mean_2))
    std = tl.where(channel == 0, std_0, tl.where(channel == 1, std_1, std_2))
    scaled = tl.div_rn(_rounded(total, shift).to(tl.float32) - mean, tl.zeros([ROWS, COLUMNS], tl.float32) + std)

    out_ptr += (frame_out // TEMPORAL).to(tl.int64) * out_group + frame_out % TEMPORAL * out_frame + channel * out_channel
    if PATCH:
        side: tl.constexpr = PATCH * MERGE
        lines = y // side * (target_width // side * MERGE * MERGE) + y % side // PATCH * MERGE
        columns = x // side * (MERGE * MERGE) + x % side // PATCH
        at_line, at_column = lines * row + y % PATCH * PATCH, columns * row + x % PATCH
    else:
        at_line, at_column = y * row, x
    tl.store(out_ptr + at_line[:, None] + at_column[None, :], scaled.to(out_ptr.dtype.element_ty), mask=inside)


@functools.lru_cache(maxsize=128)
def table(size: int, target: int, filter: str, device: torch.device) -> tuple[Tensor, int, int]:
    """Return `resize_weights` on the device, the number of taps, and the number of fraction bits."""
    made, shift = resize_weights(size, target, filter)
    return upload(made.contiguous(), device), len(made) - 1, shift


def preprocess_frames(
    frames: Tensor, target: tuple[int, int], filter: str, normalization: Normalization, layout: PatchLayout, dtype: torch.dtype
) -> Tensor:
    """Compute `pixels.preprocess_frames`. `dtype` may be uint8 if the normalisation is the identity."""
    n, height, width, _ = frames.shape
    planes = frames.permute(0, 3, 1, 2) if width == target[1] else _columns(frames, target[1], filter)
    groups, patch = -(-n // layout.temporal), layout.patch
    if patch:
        row = 3 * layout.temporal * patch * patch
        out = torch.empty((groups * (target[0] // patch) * (target[1] // patch), row), dtype=dtype, device=frames.device)
        steps = (out.numel() // groups, patch * patch, layout.temporal * patch * patch, row)
    else:
        out = torch.empty((n, 3, *target), dtype=dtype, device=frames.device)
        steps = (3 * target[0] * target[1], 0, target[0] * target[1], target[1])
    there, taps, shift = table(height, target[0], filter, frames.device)
    shape = launch_config.get_config("pixels", "rows")
    parts = triton.cdiv(target[0], shape["ROWS"]) * triton.cdiv(target[1], shape["COLUMNS"])
    _lines_kernel[(parts, 3, groups * layout.temporal)](
        planes, keep_alive(there), out, n, height, *target, taps, shift, *planes.stride(), *steps,
        *normalization.mean, *normalization.std, PATCH=patch, MERGE=layout.merge, TEMPORAL=layout.temporal, **shape,
    )  # fmt: skip
    return out


def resize(frames: Tensor, target: tuple[int, int], filter: str) -> Tensor:
    """Compute `pixels.resize`."""
    if tuple(frames.shape[1:3]) == target:
        return frames.permute(0, 3, 1, 2)
    return preprocess_frames(frames, target, filter, _IDENTITY, PatchLayout(), torch.uint8)


def _columns(frames: Tensor, target: int, filter: str) -> Tensor:
    """Resize columns: uint8 `[n, h, w, 3]` -> uint8 `[n, 3, h, target]`."""
    frames = frames if frames.stride(3) == 1 and frames.stride(2) == 3 else frames.contiguous()
    n, height, width, _ = frames.shape
    out = torch.empty((n, 3, height, target), dtype=torch.uint8, device=frames.device)
    there, taps, shift = table(width, target, filter, frames.device)
    shape = launch_config.get_config("pixels", "columns")
    _columns_kernel[(triton.cdiv(n * height, shape["ROWS"]), triton.cdiv(target, shape["COLUMNS"]))](
        frames, keep_alive(there), out, n * height, height, width, target, taps, shift, *frames.stride()[:2], **shape
    )
    return out
