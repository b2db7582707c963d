"""The packed vision tower of Qwen2-VL and Qwen2.5-VL: items of many requests in one call, rows see only their own frame.

Sources: arXiv 2409.12191 (native resolution, 2-D rotary, merger), arXiv 2502.13923 (window attention, RMSNorm, SwiGLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ...kernels.rope import rotary_cos_sin, rotate_
from ...kernels.varlen import varlen_attention
from ..layers.basic import ACTIVATIONS, Norm
from ..layers.linear import Linear
from ..text.decoder import SwiGLU


@dataclass(frozen=True)
class TowerConfig:
    """`window`: merged patches a window side, 0 for none; `full_layers`: layers that see whole frames (all when no window).

    `act` is None for RMSNorm and SwiGLU, else the activation of a two-layer MLP with LayerNorm.
    """

    depth: int
    width: int
    heads: int
    inner: int
    out_width: int
    patch_dim: int
    merge: int
    act: str | None
    rope_theta: float
    window: int = 0
    full_layers: frozenset[int] = frozenset()

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Layout:
    """The order in which patches run through the tower, shared by all layers.

    `order`: int64 `[merged]`, the merged patches window by window within their frame; None when natural.
    `frames`, `windows`: patches of each segment in that order. `h`, `w`: int64 `[patches]`.
    """

    order: Tensor | None
    frames: list[int]
    windows: list[int]
    h: Tensor
    w: Tensor


def plan_layout(grids: Sequence[tuple[int, int, int]], merge: int, window: int) -> Layout:
    """Segments and coordinates of items with patch grids `(t, h, w)`.

    Example: 2x3 merged patches and windows of 2x2 run as 0 1 3 4 | 2 5, segments of 16 and 8 patches (merge 2).
    Windows of one size lie next to each other, so that attention takes them as one batch.
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
        y, x = (_merge_order(axis, merge) for axis in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
        for _ in range(t):
            order.append(frame + base)
            rows.append(y[frame])
            columns.append(x[frame])
            base += index.numel()
        frames += [h * w] * t
        windows += [piece.numel() * unit for piece in pieces] * t
    natural = windows == frames
    return Layout(
        None if natural else torch.cat(order), frames, windows, torch.cat(rows).flatten(), torch.cat(columns).flatten()
    )


def _merge_order(grid: Tensor, merge: int) -> Tensor:
    """`[h, w]` -> `[merged, merge * merge]`, as patches come from the processor."""
    h, w = grid.shape
    return grid.view(h // merge, merge, w // merge, merge).transpose(1, 2).reshape(-1, merge * merge)


class Attention(nn.Module):
    def __init__(self, c: TowerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.dim = c.heads, c.head_dim
        self.qkv = Linear(c.width, {"qkv": 3 * c.width}, True, dtype, device)
        self.proj = Linear(c.width, {"proj": c.width}, True, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: list[int]) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], 3 * self.heads, self.dim)  # [patches, q | k | v heads, dim]
        rotate_(qkv[:, : 2 * self.heads], cos, sin)
        q, k, v = qkv.split(self.heads, 1)
        out = varlen_attention(q, k, v, segments, self.dim**-0.5)
        return self.proj(out.flatten(1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two layers around one activation."""

    def __init__(self, c: TowerConfig, act: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.act = ACTIVATIONS[act]
        self.fc1 = Linear(c.width, {"fc1": c.inner}, True, dtype, device)
        self.fc2 = Linear(c.inner, {"fc2": c.width}, True, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, c: TowerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm1 = Norm(c.width, 1e-6, c.act is not None, dtype, device)
        self.norm2 = Norm(c.width, 1e-6, c.act is not None, dtype, device)
        self.attn = Attention(c, dtype, device)
        self.mlp = SwiGLU(c.width, c.inner, True, dtype, device) if c.act is None else Mlp(c, c.act, dtype, device)

    def forward(self, x: Tensor, add: Tensor | None, cos: Tensor, sin: Tensor, segments: list[int]) -> Tensor:
        """Works on the residual stream `x` in place; what each part adds to it is added by the norm that comes next."""
        add = self.attn(self.norm1(x, add), cos, sin, segments)
        return self.mlp(self.norm2(x, add))  # type: ignore[no-any-return]


class Merger(nn.Module):
    """Normed groups of merge x merge patches -> one row of the decoder's width."""

    def __init__(self, c: TowerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.wide = c.width * c.merge**2
        self.ln_q = Norm(c.width, 1e-6, c.act is not None, dtype, device)
        first, last = (
            Linear(self.wide, {"0": self.wide}, True, dtype, device),
            Linear(self.wide, {"2": c.out_width}, True, dtype, device),
        )
        self.mlp = nn.ModuleList([first, nn.Identity(), last])

    def forward(self, x: Tensor, add: Tensor | None) -> Tensor:
        first, _, last = self.mlp
        return last(activation("gelu", first(self.ln_q(x, add).view(-1, self.wide))))  # type: ignore[no-any-return]


class Tower(nn.Module):
    """Patches `[patches, patch_dim]` of items with grids `(t, h, w)` -> `[patches / merge^2, out_width]`, natural order."""

    def __init__(self, c: TowerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = c
        embed = Linear(c.patch_dim, {"proj": c.width}, False, dtype, device)
        self.patch_embed = nn.ModuleDict({"proj": embed})
        self.blocks = nn.ModuleList(Block(c, dtype, device) for _ in range(c.depth))
        self.merger = Merger(c, dtype, device)
        half = c.head_dim // 2
        freq = c.rope_theta ** (-torch.arange(0, half, 2, dtype=torch.float32) / half)
        self.inv_freq = freq.repeat(2).to(device)  # rows turn the first quarter of a head, columns the second
        self.axis_of_freq = torch.arange(2).repeat_interleave(len(freq)).to(device)
        self.dtype, self.device = dtype, device

    def forward(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        c, unit = self.config, self.config.merge**2
        layout = plan_layout(grids, c.merge, c.window)
        x = self.patch_embed["proj"](patches.to(self.dtype))
        order = None if layout.order is None else layout.order.to(self.device)
        if order is not None:
            x = x.view(-1, unit, c.width)[order].flatten(0, 1)
        positions = torch.stack((layout.h, layout.w)).to(self.device)
        cos, sin = rotary_cos_sin(positions, self.inv_freq, self.axis_of_freq)
        add = None
        for i, block in enumerate(self.blocks):
            add = block(x, add, cos, sin, layout.windows if c.window and i not in c.full_layers else layout.frames)
        rows = self.merger(x, add)
        if order is None:
            return rows  # type: ignore[no-any-return]
        out = torch.empty_like(rows)
        out[order] = rows
        return out
