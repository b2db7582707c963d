"""Convolutions over time that keep the length, and their transpose, which multiplies it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .basic import WeightedLayer


def add_depthwise_(out: Tensor, x: Tensor, kernel: Tensor, lengths: Sequence[int], before: int) -> None:
    """Add a depthwise convolution over time of the rows of each item, zero-padded per item, to `out`.

    torch's convolution would copy the rows once per tap.

    Args:
        out, x: `[rows, width]`, the items one after another. lengths: rows of each item.
        kernel: `[width, 1, taps]`.
        before: rows before a row that the kernel sees.
    """
    after = kernel.shape[2] - 1 - before
    for item, target in zip(x.split(list(lengths)), out.split(list(lengths)), strict=True):
        padded = F.pad(item, (0, 0, before, after))
        for tap, weight in enumerate(kernel[:, 0].T):
            target.addcmul_(padded[tap : tap + len(item)], weight)


class Conv1d(WeightedLayer):
    """`[batch, inner, time] -> [batch, outer, time]`.

    Args:
        pad: how the ends are padded: "constant" (zeros) or "reflect".
    """

    def __init__(
        self,
        inner: int,
        outer: int,
        taps: int,
        device: torch.device,
        *,
        dilation: int = 1,
        bias: bool = True,
        pad: str = "constant",
    ) -> None:
        super().__init__()
        self.dilation, self.pad = dilation, pad
        self.weight = torch.empty(outer, inner, taps, device=device)
        self.bias = torch.empty(outer, device=device) if bias else None

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight
        if self.bias is not None:
            yield f"{path}.bias", self.bias

    def forward(self, x: Tensor) -> Tensor:
        around = self.dilation * (self.weight.shape[2] - 1)
        if around:
            x = F.pad(x, (around // 2, around - around // 2), self.pad)
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation)


class Upsample1d(WeightedLayer):
    """`[batch, inner, time] -> [batch, outer, stride * time]`; `taps - stride` is even."""

    def __init__(self, inner: int, outer: int, taps: int, stride: int, device: torch.device) -> None:
        super().__init__()
        self.stride, self.cut = stride, (taps - stride) // 2
        self.weight = torch.empty(inner, outer, taps, device=device)
        self.bias = torch.empty(outer, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight
        yield f"{path}.bias", self.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, self.weight, self.bias, self.stride, self.cut)
