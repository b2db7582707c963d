"""Products of low-rank adapters: `out += (x @ down.T) @ up`, each row with its own adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional as F

PANEL = 16
"""Outputs that the kernel computes together."""


@dataclass(frozen=True, eq=False)
class LowRankWeights:
    """The matrices that an adapter adds to a linear layer, all in one dtype and on one device.

    Args:
        down: `[ranks of all shards, inputs]`.
        ups: per shard: its rows of `down`, its outputs, and `pack_up` of its other matrix, with the scale multiplied in.
        gains: number of a shard -> gain and shift by which the layer's own outputs are changed first (DoRA), each padded to
            whole panels.
    """

    down: Tensor
    ups: Sequence[tuple[slice, slice, Tensor]]
    gains: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def pack_up(up: Tensor) -> Tensor:
    """Return `up [outputs, rank]` in panels: `[outputs / PANEL, rank, PANEL]`, padded with zeros."""
    padded = F.pad(up, (0, 0, 0, -len(up) % PANEL))
    return padded.view(-1, PANEL, up.shape[1]).transpose(1, 2).contiguous()
