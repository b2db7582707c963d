"""From a tower's rows to the decoder's: groups of patches joined, normed and projected. Knows no family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ..config import known_act
from .tree import Maker


@dataclass(frozen=True)
class ProjectorSpec:
    """One or two linear layers over groups of neighbouring rows, with a norm before them.

    Args:
        width: of a row. group: rows that are joined to one; a square of a tower whose patches come in squares.
        out: width of the result. inner: between two layers, None for `group * width`.
        layers: their names in the checkpoint, below the projector; `act` stands between two.
        bias: of both.
        norm: its name, None for none; `rms`: RMSNorm, else LayerNorm. joined_norm: over a whole group, else over each row.
        norm_offset: added to the norm's weight.
        averaged: a group is averaged before all else, not joined.
        channels_first: a group is joined channel by channel, as a convolution's weight has it, else row by row.
    """

    width: int
    out: int
    layers: tuple[str, ...]
    group: int = 1
    inner: int | None = None
    act: str = "gelu"
    bias: bool = True
    norm: str | None = None
    eps: float = 1e-5
    rms: bool = False
    joined_norm: bool = False
    norm_offset: float = 0.0
    averaged: bool = False
    channels_first: bool = False

    @property
    def wide(self) -> int:
        """Of what is made of a group."""
        return self.width if self.averaged else self.width * self.group

    @property
    def widths(self) -> tuple[int, ...]:
        """Of what each layer makes."""
        return (self.out,) if len(self.layers) == 1 else (self.inner or self.wide, self.out)


class Projector(nn.Module):
    """`[rows, width]` -> `[rows / group, out]`; ConfigError names an activation that is not there."""

    def __init__(self, spec: ProjectorSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        known_act("a projector's activation", spec.act)
        self.spec, make = spec, Maker(self, dtype, device)
        normed = spec.wide if spec.joined_norm else spec.width
        self.norms = [] if spec.norm is None else [make.norm(spec.norm, normed, spec.eps, not spec.rms, spec.norm_offset)]
        inner, self.layers = spec.wide, []
        for name, outer in zip(spec.layers, spec.widths, strict=True):
            self.layers.append(make.linear([name], inner, [outer], spec.bias))
            inner = outer

    def forward(self, x: Tensor) -> Tensor:
        s = self.spec
        if s.averaged:
            x = x.view(-1, s.group, s.width).mean(1)
        for norm in self.norms:
            x = norm(x.view(-1, s.wide) if s.joined_norm else x)
        if s.channels_first and s.group > 1:
            x = x.view(-1, s.group, s.width).transpose(1, 2)
        first, *others = self.layers
        x = first(x.reshape(-1, s.wide))
        for layer in others:
            x = layer(activation(s.act, x))
        return x


def squares(rows: Tensor, grids: Sequence[tuple[int, int, int]], merge: int) -> Tensor:
    """`[patches, width]` row by row of grids `(t, h, w)` -> the same in squares of merge x merge, row by row of squares.

    What is left of a grid on the right and below a whole number of squares is dropped.
    """
    parts, start = [], 0
    for t, h, w in grids:
        tall, wide = h // merge, w // merge
        grid = rows[start : start + t * h * w].view(t, h, w, -1)[:, : tall * merge, : wide * merge]
        grid = grid.unflatten(2, (wide, merge)).unflatten(1, (tall, merge))
        parts.append(grid.transpose(2, 3).reshape(t * tall * wide * merge**2, -1))
        start += t * h * w
    return torch.cat(parts)
