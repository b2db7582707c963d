"""Positions of patches: their order in a tower, rotary frequencies and learned position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .spec import RotarySpec, TableSpec

Grid = tuple[int, int, int]
"""`(t, h, w)` of one item in patches; the tiles of an image count as frames."""


@dataclass(frozen=True)
class TowerLayout:
    """The order in which patches pass through the tower, and the segments that attend to each other.

    Args:
        order: int64 `[squares]`, the merged squares window by window within each frame; None: the order of the input.
        frames, windows: number of patches of each frame, and of each window, in that order.
        h, w: int64 `[patches]`, row and column of each patch.
    """

    order: Tensor | None
    frames: list[int]
    windows: list[int]
    h: Tensor
    w: Tensor


def plan_layout(grids: Sequence[Grid], merge: int, window: int) -> TowerLayout:
    """Plan order, segments and coordinates of the patches of items with these grids.

    Example: 2x3 squares in windows of 2x2 are ordered 0 1 3 4 | 2 5, segments of 16 and 8 patches (merge 2). Windows of equal
    size are adjacent, so that attention can batch them.
    """
    order, frames, windows, rows, columns = [], [], [], [], []
    base, unit = 0, merge * merge
    for t, h, w in grids:
        index = torch.arange(h * w // unit).view(h // merge, w // merge)
        pieces = [index]
        if window:
            pieces = [piece for band in index.split(window, 0) for piece in band.split(window, 1)]
            pieces.sort(key=lambda piece: -piece.numel())
        frame = torch.cat([piece.flatten() for piece in pieces])
        y, x = (in_squares(axis, merge) for axis in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
        for _ in range(t):
            order.append(frame + base)
            rows.append(y[frame])
            columns.append(x[frame])
            base += index.numel()
        frames += [h * w] * t
        windows += [piece.numel() * unit for piece in pieces] * t
    natural = windows == frames
    return TowerLayout(
        None if natural else torch.cat(order), frames, windows, torch.cat(rows).flatten(), torch.cat(columns).flatten()
    )


def in_squares(grid: Tensor, merge: int) -> Tensor:
    """Reorder `[h, w, ...]` to `[squares, merge * merge, ...]`, the order in which patches come from the processor."""
    h, w = grid.shape[:2]
    blocks = grid.reshape(h // merge, merge, w // merge, merge, *grid.shape[2:]).transpose(1, 2)
    return blocks.reshape(-1, merge * merge, *grid.shape[2:])


def frequencies(spec: RotarySpec, dim: int) -> tuple[Tensor, Tensor]:
    """Return float32 frequencies `[dim / 2]` and the axis of each, int64 `[dim / 2]`: 0 for rows, 1 for columns, 2 for time.

    If the angles of a pair are unequal, `[dim]`: first those of the first number of each pair.
    """
    half = dim // 2
    if spec.order == "even_odd":
        each = spec.theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        return torch.cat((each[0::2], each[1::2])), torch.arange(2).repeat_interleave(half // 2)
    if spec.order == "frames":
        counts = [half // 4, half * 3 // 8, half * 3 // 8]
        parts = [1.0 / spec.theta ** (torch.arange(count, dtype=torch.float32) / count) for count in counts]
        axes_of_half = torch.tensor((2, 0, 1)).repeat_interleave(torch.tensor(counts))
        numbers = torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2))) % half
        return torch.cat(parts)[numbers], axes_of_half[numbers]
    each = spec.theta ** (-torch.arange(0, half, 2, dtype=torch.float32) / half)
    if spec.order == "alternating":
        return each.repeat_interleave(2), torch.tensor((1, 0)).repeat(len(each))
    assert spec.order in ("blocks", "columns_first"), f"order of frequencies {spec.order!r}"
    axes = (1, 0) if spec.order == "columns_first" else (0, 1)
    return each.repeat(2), torch.tensor(axes).repeat_interleave(len(each))


def add_positions_(
    x: Tensor, table: Tensor, spec: TableSpec, grids: Sequence[Grid], merge: int, trailing: Sequence[int] = ()
) -> None:
    """Add position embeddings `[side * side, width]`, fitted to each item's grid, to its patches `x [patches, width]` in place.

    Patches come in squares. An item's embeddings depend on its grid alone. The `trailing` patches after those of each grid get
    the first embedding.
    """
    start = 0
    for (t, h, w), more in zip(grids, trailing or [0] * len(grids), strict=True):
        frame = in_squares(_fitted(table, spec, h, w), merge).flatten(0, 1)
        if t > 1 and spec.frames:
            times = _sinusoids(t, table.shape[1]).to(frame.device)
            frame = (frame.float() + times[:, None]).to(x.dtype)
        x[start : start + t * h * w].view(t, h * w, -1).add_(frame)
        start += t * h * w
        if more:
            x[start : start + more] += table[0]
            start += more


def _fitted(table: Tensor, spec: TableSpec, h: int, w: int) -> Tensor:
    """Fit the table to a grid: `[h, w, width]`."""
    side = spec.side
    square = table.view(side, side, -1)
    if spec.fit.endswith("buckets"):
        rows, columns = (_buckets(count, side, spec.fit).to(table.device) for count in (h, w))
        return square[rows[:, None], columns]
    if (h, w) == (side, side):
        return square
    if spec.fit == "corner":
        assert max(h, w) <= side, f"a grid of {h}x{w} patches for a table of {side}x{side} positions"
        return square[:h, :w]
    if spec.fit == "square":
        return _corner(square, h, w).to(table.dtype)
    assert spec.fit != "exact", f"a grid of {h}x{w} patches for a table of {side}x{side} positions"
    corners = {"align_corners": spec.align_corners, "antialias": spec.antialias}
    planes = square.float().permute(2, 0, 1)[None]
    return F.interpolate(planes, (h, w), mode=spec.fit, **corners)[0].permute(1, 2, 0).to(table.dtype)


def _corner(square: Tensor, h: int, w: int) -> Tensor:
    """Resample `[side, side, width]` bilinearly to a square of max(h, w), but compute its upper left `[h, w, width]` only."""
    side = len(square)
    places = ((torch.arange(max(h, w), dtype=torch.float32) + 0.5) * (side / max(h, w)) - 0.5).clamp(min=0)
    low = places.long()
    parts = torch.stack((low, (low + 1).clamp(max=side - 1))).to(square.device)
    weight = (places - low).to(square.device)
    (top, bottom), (left, right), across = parts[:, :h, None], parts[:, None, :w], weight[:w, None]
    upper, lower = (square[rows, left].float().lerp_(square[rows, right].float(), across) for rows in (top, bottom))
    return upper.lerp_(lower, weight[:h, None, None])


def _buckets(count: int, side: int, fit: str) -> Tensor:
    """Return the table position of each of `count` patches along a side; float32 like the published models.

    They compute the place of corner i as i * (1 / count) ("buckets": Idefics), as i / count ("ratio_buckets": MiniCPM-V 4.6) or
    as torch's range of steps ("step_buckets": earlier MiniCPM-V).
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    if fit == "buckets":
        corners = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    elif fit == "ratio_buckets":
        corners = torch.arange(count) / count
    else:  # a recorded call may not read a tensor, so numpy rounds the step to float32
        corners = torch.arange(0, 1 - 1e-6, float(np.float32(1) / np.float32(count)))
    return torch.bucketize(corners, bounds, right=True)


def _sinusoids(frames: int, width: int) -> Tensor:
    """Return float32 `[frames, width]`: sines, then cosines, of `frame * 10000 ** (-2i / width)` (arXiv 1706.03762, 3.5)."""
    freq = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(frames, dtype=torch.float32)[:, None] * freq
    return torch.cat((angles.sin(), angles.cos()), 1)
