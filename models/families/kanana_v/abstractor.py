"""The dynamic C-Abstractor: RegNet's blocks before and after squares of patches are joined, and linear layers.

Sources: arXiv 2312.06742 (Honeybee), 2003.13678 (RegNet); the publisher's class; timm's `RegStage`. The tower's rows are in
squares, but the published class reads them as lines of a plane, and so does this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.activation import activation
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...layers.convolution import depthwise_same, depthwise_same_bytes
from ...memory_formulas import FLOAT32, OpBytes
from ...vision.positions import add_positions_
from ...vision.spec import TableSpec

_ACT, _EPS, _RATIO = "silu", 1e-5, 0.25  # activation, epsilon of norms, inner width of a channel's factors as a share


@dataclass(frozen=True)
class AbstractorSpec:
    """Blocks from `width` to `inner` numbers, squares of `merge` patches, blocks again, and `layers` linear layers to `out`.

    `depth`: blocks before and after the squares. `table`: side of the learned positions; 0: none. `prenorm`: rows are normed
    first.
    """

    width: int
    inner: int
    out: int
    depth: int
    merge: int
    layers: int
    table: int
    prenorm: bool = False

    @property
    def readout(self) -> ProjectorSpec:
        names = tuple(str(2 * number) for number in range(self.layers))
        return ProjectorSpec(self.inner, self.out, names, inner=self.out, act=_ACT)

    @property
    def stages(self) -> tuple[int, int]:
        """Numbers of a row before each stage."""
        return self.width, self.merge**2 * self.inner


class _NormedLinear:
    """A linear layer without bias and a norm."""

    def __init__(self, build: Builder, inner: int, outer: int, act: bool) -> None:
        self.layer = build.linear(["conv"], inner, [outer], False)
        self.norm, self.act = build.norm("bn", outer, _EPS, True), act

    def __call__(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x))
        return activation(_ACT, x) if self.act else x


class _Block:
    """`[patches, inner]` -> `[patches, outer]` of one image: a bottleneck of RegNet with a factor per channel."""

    def __init__(self, build: Builder, inner: int, outer: int) -> None:
        self.first = _NormedLinear(build.scope("conv1"), inner, outer, act=True)
        middle, factors = build.scope("conv2"), build.scope("se")
        self.kernel, self.norm = middle.stored("conv.weight", outer, 1, 3, 3), middle.norm("bn", outer, _EPS, True)
        small = round(inner * _RATIO)
        self.squeeze, self.excite = (
            factors.linear([name], *sizes, bias=True) for name, sizes in (("fc1", (outer, [small])), ("fc2", (small, [outer])))
        )
        self.last = _NormedLinear(build.scope("conv3"), outer, outer, act=False)
        self.shortcut = None if inner == outer else _NormedLinear(build.scope("downsample"), inner, outer, act=False)

    def __call__(self, x: Tensor, height: int, width: int) -> Tensor:
        y = self.first(x)
        y = depthwise_same(y.view(height, width, -1), self.kernel.weight).flatten(0, 1)
        y = activation(_ACT, self.norm(y))
        factors = self.excite(activation(_ACT, self.squeeze(y.mean(0, keepdim=True))))
        y *= factors.sigmoid()
        y = self.last(y)
        y += x if self.shortcut is None else self.shortcut(x)
        return activation(_ACT, y)


class Abstractor(TensorModule):
    """`[patches, width]` of one image -> `[patches / merge^2, out]`."""

    def __init__(self, spec: AbstractorSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, build = spec, Builder(self, dtype, device)
        self.norm = build.norm("prenorm", spec.width, 1e-6, True) if spec.prenorm else None
        self.table = build.stored("pos_emb", spec.table**2, spec.width) if spec.table else None
        self.stages: list[list[_Block]] = []
        for name, first in zip(("net.0", "net.2"), spec.stages, strict=True):
            widths = [first, *[spec.inner] * (spec.depth - 1)]
            self.stages.append([_Block(build.scope(f"{name}.b{i}"), width, spec.inner) for i, width in enumerate(widths, 1)])
        self.readout = Projector(spec.readout, dtype, device)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """Return the rows of an image. Positions are added to x in place."""
        s = self.spec
        if self.norm is not None:
            x = self.norm(x)
        if self.table is not None:
            add_positions_(x, self.table.weight, TableSpec(s.table, "bicubic", antialias=True), [(1, height, width)], 1)
        for block in self.stages[0]:
            x = block(x, height, width)
        height, width = height // s.merge, width // s.merge
        squares = x.view(height, s.merge, width, s.merge, s.inner).permute(0, 2, 4, 1, 3)  # numbers of a square by channel
        x = squares.reshape(height * width, -1)
        del squares
        for block in self.stages[1]:
            x = block(x, height, width)
        return self.readout(x)


def abstractor_bytes(c: AbstractorSpec, patches: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in Abstractor for an image of `patches` patches, without its input."""
    ops, s, group = OpBytes(dtype, limits), dtype.itemsize, c.merge**2
    rows, plane = patches // group, patches * c.inner * s
    normed = patches * c.width * s * c.prenorm
    peak = normed + patches * (c.width * (FLOAT32 + 2 * s)) * bool(c.table)
    for number, (first, count) in enumerate(zip(c.stages, (patches, rows), strict=True)):
        held = normed if number == 0 else count * first * s
        peak = max(peak, held + _block_bytes(first, c.inner, count, ops))
        if c.depth > 1:
            peak = max(peak, count * c.inner * s + _block_bytes(c.inner, c.inner, count, ops))
    return max(peak, 2 * plane, rows * projector_bytes(c.readout, 1, rows, dtype, limits))


def _block_bytes(inner: int, outer: int, rows: int, ops: OpBytes) -> int:
    """Return the bytes alive in _Block, without its input."""
    s = ops.dtype.itemsize
    plane = rows * outer * s

    def linear(width: int) -> int:
        return max(rows * ops.linear(width, outer, rows), rows * (ops.linear_result(outer, rows) + ops.norm(outer, False)))

    convolved = plane + depthwise_same_bytes(rows, outer, ops)
    return max(linear(inner), 3 * plane, convolved, plane + linear(outer), plane + linear(inner) * (inner != outer))
