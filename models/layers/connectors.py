"""Projectors between an encoder and the decoder: rows are grouped, normed and projected to the decoder's width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...checkpoints.config import check_activation
from ...kernels.activation import act_and_mul, activation
from ..interface import StepLimits
from ..memory_formulas import OpBytes
from .basic import Converter, Convertible, TensorModule
from .builder import Builder


@dataclass(frozen=True)
class ProjectorSpec:
    """Linear layers over groups of adjacent rows, with an optional norm before them.

    Args:
        width, out: numbers per input row, and per result row.
        layers: names of the linear layers below the projector; `act` is applied between two of them.
        group: input rows per result row; a square of patches if the tower's patches come in squares.
        inner: width between two layers; None: `group * width`.
        bias: the layers have a bias.
        gated: the first layer gives `inner` values, then their gates; `act` is that of the gates.
        norm: name of the norm; None: no norm. rms: RMSNorm instead of LayerNorm. norm_offset: added to its weight.
        joined_norm: the norm is over a whole group instead of each row.
        averaged: the rows of a group are averaged first instead of concatenated.
        channels_first: a group is concatenated channel by channel, like the weight of a convolution, instead of row by row.
    """

    width: int
    out: int
    layers: tuple[str, ...]
    group: int = 1
    inner: int | None = None
    act: str = "gelu"
    bias: bool = True
    gated: bool = False
    norm: str | None = None
    eps: float = 1e-5
    rms: bool = False
    joined_norm: bool = False
    norm_offset: float = 0.0
    averaged: bool = False
    channels_first: bool = False

    @property
    def group_width(self) -> int:
        """Width of a group after it is concatenated or averaged."""
        return self.width if self.averaged else self.width * self.group

    @property
    def outputs(self) -> tuple[int, ...]:
        """Output width of each layer."""
        inner = (self.inner or self.group_width) * (1 + self.gated)
        return (inner,) * (len(self.layers) - 1) + (self.out,)


class Projector(TensorModule, Convertible):
    """`[rows, width]` -> `[rows / group, out]`. Raises ConfigError for an unknown activation."""

    def __init__(self, spec: ProjectorSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        spec = replace(spec, act=check_activation("a projector's activation", spec.act))
        self.spec, build = spec, Builder(self, dtype, device)
        normed = spec.group_width if spec.joined_norm else spec.width
        self.norms = [] if spec.norm is None else [build.norm(spec.norm, normed, spec.eps, not spec.rms, spec.norm_offset)]
        inner, self.layers = spec.group_width, []
        for name, outer in zip(spec.layers, spec.outputs, strict=True):
            self.layers.append(build.linear([name], inner, [outer], spec.bias))
            inner = outer // (1 + spec.gated)

    def forward(self, x: Tensor) -> Tensor:
        s = self.spec
        if s.averaged:
            x = x.view(-1, s.group, s.width).mean(1)
        for norm in self.norms:
            x = norm(x.view(-1, s.group_width) if s.joined_norm else x)
        if s.channels_first and s.group > 1:
            x = x.view(-1, s.group, s.width).transpose(1, 2)
        first, *others = self.layers
        x = first(x.reshape(-1, s.group_width))
        for layer in others:
            x = layer(act_and_mul(s.act, x) if s.gated else activation(s.act, x))
        return x

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield converters that put the gates before the values, where `act_and_mul` reads them."""
        for name in (f"{path}.{self.spec.layers[0]}.{kind}" for kind in ("weight", "bias") if self.spec.gated):
            yield name, partial(_gates_first, name)

    def extra_bytes(self, rows: int) -> int:
        """Return the bytes that a subclass needs for this many result rows beyond `projector_bytes`."""
        return 0


def _gates_first(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor.roll(len(tensor) // 2, 0)


def squares(rows: Tensor, grids: Sequence[tuple[int, int, int]], merge: int) -> Tensor:
    """Reorder the rows of patches from row-major grids `(t, h, w)` to squares of merge x merge patches, in row-major order.

    `[patches, width]` -> `[squares * merge^2, width]`. Patches at the right and bottom that fill no square are dropped.
    """
    parts, start = [], 0
    for t, h, w in grids:
        tall, wide = h // merge, w // merge
        grid = rows[start : start + t * h * w].view(t, h, w, -1)[:, : tall * merge, : wide * merge]
        grid = grid.unflatten(2, (wide, merge)).unflatten(1, (tall, merge))
        parts.append(grid.transpose(2, 3).reshape(t * tall * wide * merge**2, -1))
        start += t * h * w
    return torch.cat(parts)


def in_lines(plane: Tensor, line_end: Tensor) -> Tensor:
    """Append a learned row `[width]` to each line of `[rows, columns, width]`: `[rows * (columns + 1), width]`."""
    return torch.cat((plane, line_end.expand(len(plane), 1, -1)), 1).flatten(0, 1)


def tiles_in_lines(tiles: Sequence[Tensor] | Tensor, columns: int, line_end: Tensor, separator: Tensor) -> Tensor:
    """Return the rows of an image line by line: those of its tiles, `separator` `[width]`, those of the whole image.

    `tiles`: `[rows, columns, width]` each: the whole image, then its tiles in bands of `columns`.
    """
    bands = [torch.cat(list(tiles[start : start + columns]), 1) for start in range(1, len(tiles), columns)]
    cut, whole = (in_lines(plane, line_end) for plane in (torch.cat(bands), tiles[0]))
    return torch.cat((cut, separator[None], whole))


def projector_bytes(c: ProjectorSpec, states: int, patches: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes per input row alive in Projector, for `patches` input rows from `states` states of a tower."""
    ops = OpBytes(dtype, limits)
    s, row = dtype.itemsize, c.width * dtype.itemsize
    inner, inputs = c.group_width, row + (row if states > 1 else 0)  # several states are concatenated
    copies = row * (c.norm is not None) + row * (c.channels_first and c.group > 1)
    peak = inputs + copies + ops.norm(c.width, c.rms) * (c.norm is not None)
    result = 0
    for number, outer in enumerate(c.outputs):
        peak = max(peak, inputs + copies + result + ops.linear(inner, outer, patches) // c.group)
        last, inner = number + 1 == len(c.outputs), outer // (1 + c.gated)
        result = (outer if last else outer + inner) * s // c.group  # before and after the activation
        peak = max(peak, inputs + copies + result)
    return max(peak, inputs + 3 * c.out * s // c.group)  # in the order of items, and split into items
