"""SAM's tower for one image at a time: attention in square windows with relative positions, then convolutions.

Sources: arXiv 2304.02643 (the tower), 2203.16527 (windows in a plain transformer), 2112.01526 (relative positions).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...checkpoints.config import check_activation, positive_int
from ...kernels.dispatch import backend
from ...kernels.varlen import varlen_attention
from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder
from ..layers.relative_position import relative_position_scores
from ..memory_formulas import SMALL, OpBytes
from .positions import add_positions_
from .spec import TableSpec, TowerNames, TowerSpec
from .vit import VisionMlp, vision_mlp_bytes

SAM = TowerNames(table="pos_embed", mlp=("mlp.lin1", "mlp.lin2"))
"""Names such as `blocks.<i>.attn.qkv`."""

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768, "output_channels": 256, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3,
    "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qkv_bias": True, "mlp_ratio": 4.0,
    "use_abs_pos": True, "use_rel_pos": True, "window_size": 14, "global_attn_indexes": (2, 5, 8, 11),
}  # fmt: skip
TAPS = 9  # weights per channel of a 3 x 3 convolution
_EPS = 1e-6  # of the norms between convolutions


@dataclass(frozen=True)
class SamSpec:
    """A transformer over the patches of an image, followed by convolutions.

    Args:
        tower: the transformer. Images are padded to whole windows with empty rows, which are attended to. `table` has a
            position for every patch of the largest image.
        neck: channels after the transformer.
        down: channels of each further convolution, which halves both sides.
        positions: patches have absolute positions, from a table.
        relative: attention scores depend on the vertical and horizontal distance of query and key (relative positions).
    """

    tower: TowerSpec
    neck: int
    down: tuple[int, ...]
    positions: bool = True
    relative: bool = True

    @property
    def downsampling(self) -> int:
        """Patches along a side per result row."""
        return int(2 ** len(self.down))

    @property
    def width(self) -> int:
        """Width of a result row."""
        return (self.neck, *self.down)[-1]


class SamAttention:
    """Attention within each square of rows, with relative positions.

    The position term of a score is a dot product, too: the query's scores for every row and column of the square, times a
    one-hot vector of the key's row and column. Both are appended to the heads of queries and keys; no score matrix is needed.
    """

    def __init__(self, s: SamSpec, build: Builder, side: int) -> None:
        t = s.tower
        self.heads, self.dim, self.scale = t.heads, t.head_dim, t.head_dim**-0.5
        self.qkv = build.linear(t.names.qkv, t.width, [3 * t.width], t.qkv_bias)
        self.out = build.linear([t.names.out], t.width, [t.width], t.out_bias)
        names = ("attn.rel_pos_h", "attn.rel_pos_w") if s.relative else ()
        self.tables = [build.stored(name, 2 * side - 1, t.head_dim) for name in names]

    def __call__(self, x: Tensor, side: int) -> Tensor:
        """Attend within squares: `x` `[squares * side^2, width]`, square by square, row by row."""
        q, k, v = self._with_positions(x, side)
        out = varlen_attention(q, k, v, [side * side] * (len(x) // side**2), 1.0)
        return self.out(out[..., : self.dim].flatten(1))

    def _with_positions(self, x: Tensor, side: int) -> Tensor:
        """Return scaled queries, keys and values with position columns appended: `[3, rows, heads, dim + 2 * side]`."""
        qkv = self.qkv(x).view(-1, side, side, 3, self.heads, self.dim)
        wide = x.new_zeros(3, *qkv.shape[:3], self.heads, self.dim + 2 * side * bool(self.tables))
        wide[..., : self.dim] = qkv.permute(3, 0, 1, 2, 4, 5)
        wide[0, ..., : self.dim] *= self.scale
        if self.tables:
            q, one_hot = qkv[..., 0, :, :], torch.eye(side, dtype=x.dtype, device=x.device)
            by_row, by_column = wide[..., self.dim :].split(side, -1)
            by_row[0] = relative_position_scores(q, self.tables[0].weight, 1)
            by_column[0] = relative_position_scores(q, self.tables[1].weight, 2)
            by_row[1], by_column[1] = one_hot[None, :, None, None], one_hot[None, None, :, None]
        return wide.flatten(1, 3)


class SamLayer:
    """Attention and MLP, each after a norm."""

    def __init__(self, s: SamSpec, build: Builder, window: int, side: int) -> None:
        self.window = window
        self.norms = [build.norm(name, s.tower.width, s.tower.eps, True) for name in s.tower.names.norms]
        self.attention, self.mlp = SamAttention(s, build, window or side), VisionMlp(s.tower, build)

    def __call__(self, x: Tensor, add: Tensor | None, side: int) -> Tensor:
        """Update the residual stream `x` in place, first by `add`. Return the MLP's output, which the next layer adds."""
        normed = self.norms[0](x, add)
        if not self.window:
            add = self.attention(normed, side)
        else:
            add = _from_windows(self.attention(_to_windows(normed, side, self.window), self.window), side, self.window)
        return self.mlp(self.norms[1](x, add))


class SamTower(TensorModule):
    """Patches of one square image -> downsampled rows."""

    def __init__(self, spec: SamSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, build = spec, Builder(self, dtype, device)
        self.parts = SamParts(spec, build)

    def forward(self, patches: Tensor, side: int) -> Tensor:
        """Encode `[side^2, patch_dim]`, row by row -> `[(side / downsampling)^2, width]`, row by row."""
        parts, table = self.parts, self.spec.tower.table
        x = parts.patch(patches)
        if parts.table is not None and table is not None:
            add_positions_(x, parts.table.weight, table, [(1, side, side)], 1)
        add = None
        for layer in parts.layers:
            add = layer(x, add, side)
        x = parts.norms[0](parts.neck(x if add is None else x.add_(add)))
        x = parts.norms[1](parts.mix(_taps(x, side)))
        for convolution in parts.down:
            x = convolution(_taps(x, side, 2))
            side = -(-side // 2)
        return x


class SamParts:
    """The layers of a tower. Not a module, so that they are registered under their checkpoint names only."""

    def __init__(self, s: SamSpec, build: Builder) -> None:
        t = s.tower
        assert t.table is not None
        side = t.table.side
        self.patch = build.linear([t.names.patch], t.patch_dim, [t.width], t.patch_bias)
        self.table = build.stored(t.names.table, side**2, t.width) if s.positions else None
        windows = [0 if i in t.full_layers else t.window for i in range(t.depth)]
        self.layers = [SamLayer(s, build.scope(f"{t.names.layers}.{i}"), window, side) for i, window in enumerate(windows)]
        convolution = partial(build.linear, bias=False)
        self.neck = convolution(["neck.0"], t.width, [s.neck])
        self.mix = convolution(["neck.2"], TAPS * s.neck, [s.neck])
        self.norms = [build.norm(name, s.neck, _EPS, True) for name in ("neck.1", "neck.3")]
        widths = (s.neck, *s.down)
        self.down = [convolution([f"net_{i + 2}"], TAPS * widths[i], [wide]) for i, wide in enumerate(s.down)]


def sam_spec(config: Mapping[str, Any], down: tuple[int, ...]) -> SamSpec:
    """Read SAM's tower from its section of config.json. `down`: channels of the convolutions if it does not state them.

    Raises:
        ConfigError: a size is not a positive integer.
    """
    sam = {**_DEFAULTS, **config}
    width, patch = positive_int(sam, "hidden_size"), positive_int(sam, "patch_size")
    tower = TowerSpec(
        depth=positive_int(sam, "num_hidden_layers"),
        width=width,
        heads=positive_int(sam, "num_attention_heads"),
        inner=sam.get("mlp_dim") or int(width * sam["mlp_ratio"]),
        patch_dim=sam["num_channels"] * patch**2,
        act=check_activation("hidden_act of the vision config", sam["hidden_act"]),
        eps=sam["layer_norm_eps"],
        qkv_bias=sam["qkv_bias"],
        table=TableSpec(positive_int(sam, "image_size") // patch, fit="bicubic", antialias=True),
        window=sam["window_size"],
        full_layers=frozenset(sam["global_attn_indexes"]),
        names=SAM,
    )
    down = tuple(sam.get("downsample_channels") or down)
    return SamSpec(tower, positive_int(sam, "output_channels"), down, sam["use_abs_pos"], sam["use_rel_pos"])


def convolved_names(prefix: str) -> Sequence[tuple[str, str]]:
    """Return (stored, canonical) prefixes for checkpoints with names like `conv1` and `layer_norm1` instead of `0` and `1`."""
    neck = ("conv1", "layer_norm1", "conv2", "layer_norm2")
    renamed = [(f"neck.{name}.", f"neck.{i}.") for i, name in enumerate(neck)]
    renamed += [("proj.conv1.", "net_2."), ("proj.conv2.", "net_3."), ("patch_embed.projection.", "patch_embed.proj.")]
    return [(prefix + old, new) for old, new in renamed]


def _to_windows(x: Tensor, side: int, window: int) -> Tensor:
    """Cut `[side^2, width]` into `[windows * window^2, width]`, padded with empty rows at the right and bottom."""
    count = -(-side // window)
    fill = count * window - side
    plane = F.pad(x.view(side, side, -1), (0, 0, 0, fill, 0, fill)).view(count, window, count, window, -1)
    return plane.transpose(1, 2).reshape(-1, x.shape[1])


def _from_windows(x: Tensor, side: int, window: int) -> Tensor:
    """Undo `_to_windows`; padding is dropped."""
    count = -(-side // window)
    plane = x.view(count, count, window, window, -1).transpose(1, 2).reshape(count * window, count * window, -1)
    return plane[:side, :side].reshape(side * side, -1)


def _taps(x: Tensor, side: int, stride: int = 1) -> Tensor:
    """Return the inputs of a zero-padded 3 x 3 convolution over `[side^2, width]`: `[outputs, width * 9]`, in weight order."""
    plane = x.view(1, side, side, -1).permute(0, 3, 1, 2)
    return F.unfold(plane, 3, padding=1, stride=stride)[0].T.contiguous()


def sam_bytes(c: SamSpec, patches: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in SamTower for one image of `patches` patches."""
    ops = OpBytes(dtype, limits)
    t, s, side = c.tower, dtype.itemsize, math.isqrt(patches)
    row = t.width * s
    squares = set()  # (rows with padding, side of a square, bytes per row of the copy in windows)
    if not t.window or any(layer in t.full_layers for layer in range(t.depth)):
        squares.add((patches, side, 0))
    if t.window:
        squares.add(((-(-side // t.window) * t.window) ** 2, t.window, row))
    attention = max(_attention_bytes(c, rows, edge, windowed, ops) for rows, edge, windowed in squares)
    mlp = patches * (row + vision_mlp_bytes(t, patches, ops))  # beside attention's output
    layers = 3 * row * patches + max(attention, mlp)  # x, the previous layer's output, normed rows
    return SMALL + max(layers, patches * (row + c.neck * s * (2 * TAPS + 2)))


def _attention_bytes(c: SamSpec, rows: int, side: int, windowed: int, ops: OpBytes) -> int:
    """Return the bytes alive in SamAttention over squares of this side; `windowed`: bytes per row of its input."""
    t, s = c.tower, ops.dtype.itemsize
    row, columns = t.width * s, side * c.relative  # position columns per axis
    width = t.heads * (t.head_dim + 2 * columns)
    wide, distances = width * s, 2 * side * columns * (t.head_dim * s + 8)
    native = backend("varlen_attention", ops.limits.device, ops.dtype) == "native"
    end = wide + c.relative * row + ops.linear(t.width, t.width, rows)  # result, without columns, projected
    end = max(end, 0 if native else 2 * wide + ops.attention_copies(width))
    start = 3 * row + c.relative * row + t.heads * s * columns  # qkv, a copy of the queries, their scores
    tiles = 0 if native else ops.torch_attention_tiles(side**2, width // t.heads)
    return rows * (windowed + 3 * wide + max(start, end)) + distances + tiles
