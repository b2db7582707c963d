"""Convolutions over time that keep the length, and their transpose, which multiplies it.

The causal ones see earlier inputs only, so that they can be computed part by part: a `Past` keeps what the next part needs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels import linear
from ...kernels.convolution import PackedFilter, convolve, pack, packed_bytes
from ...kernels.linear import LinearWeight
from ..memory_formulas import OpBytes, packed_weight_bytes
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


def depthwise_planes(planes: Tensor, kernel: Tensor, stride: int) -> Tensor:
    """Convolve each channel of padded `planes [batch, channels, height, width]` with its `kernel [channels, 1, k, k]`."""
    return F.conv2d(planes, kernel, stride=stride, groups=len(kernel))


def depthwise_same(plane: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel of `plane [height, width, channels]`, zero-padded, with its `kernel [channels, 1, k, k]`, k odd."""
    edge = kernel.shape[-1] // 2
    padded = F.pad(plane, (0, 0, *[edge] * 4))[None].permute(0, 3, 1, 2)
    if copies_planes(padded.device, padded.dtype):
        padded = padded.contiguous()
    return depthwise_planes(padded, kernel, 1)[0].permute(1, 2, 0).contiguous()


def depthwise_same_bytes(rows: int, width: int, ops: OpBytes) -> int:
    """Return the bytes alive in `depthwise_same` with 3 x 3 taps, without its input, for a square plane of `rows` positions."""
    s, device = ops.dtype.itemsize, ops.limits.device
    padded = (math.isqrt(rows) + 3) ** 2 * width * s
    copies = 2 if copies_planes(device, ops.dtype) else 1
    return copies * padded + (copies + copies_results(device, s)) * rows * width * s


def copies_planes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether planes are convolved with channels first: else cuDNN would round float32 to TF32."""
    return device.type == "cuda" and dtype == torch.float32


def copies_results(device: torch.device, size: int) -> bool:
    """Return whether torch copies the results of convolutions, in numbers of `size` bytes: of 16 bits, without AVX-512."""
    return device.type == "cpu" and size < 4 and "AVX512" not in torch.backends.cpu.get_cpu_capability()


class _Kernel(WeightedLayer):
    """The tensors of a convolution. `below`: they are stored below this name.

    Args:
        shape: of the weight, [first, second, taps].
        outer: channels of the result.
        weight_norm: the checkpoint stores directions of the weight, `weight_v`, and their lengths, `weight_g [first, 1, 1]`.
    """

    below = ""

    def __init__(
        self, shape: tuple[int, int, int], outer: int, device: torch.device, bias: bool = True, weight_norm: bool = False
    ) -> None:
        super().__init__()
        self.weight = torch.empty(shape, device=device)
        self.lengths = torch.empty(shape[0], 1, 1, device=device) if weight_norm else None
        self.bias = torch.empty(outer, device=device) if bias else None

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}{self.below}.weight{'' if self.lengths is None else '_v'}", self.weight
        if self.lengths is not None:
            yield f"{path}{self.below}.weight_g", self.lengths
        if self.bias is not None:
            yield f"{path}{self.below}.bias", self.bias

    def packed_bytes(self, device: torch.device) -> int:
        return super().packed_bytes(device) - (0 if self.lengths is None else self.lengths.nbytes)

    def pack(self) -> None:
        if self.lengths is not None:
            self.weight.copy_(torch._weight_norm(self.weight, self.lengths))
            self.lengths = None


class Conv1d(_Kernel):
    """`[batch, inner, time] -> [batch, outer, time]`.

    Args:
        pad: how the ends are padded: "constant" (zeros) or "reflect".
        stride: inputs from one result to the next. zeros: number of zeros at each end if it is not `taps - 1` in all.
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
        stride: int = 1,
        zeros: int | None = None,
        weight_norm: bool = False,
    ) -> None:
        super().__init__((outer, inner, taps), outer, device, bias, weight_norm)
        self.dilation, self.pad, self.stride, self.zeros = dilation, pad, stride, zeros

    def forward(self, x: Tensor) -> Tensor:
        around = self.dilation * (self.weight.shape[2] - 1)
        zeros = around // 2 if self.zeros is None and self.pad == "constant" and around % 2 == 0 else self.zeros
        if zeros is not None:
            return F.conv1d(x, self.weight, self.bias, self.stride, zeros, self.dilation)
        x = F.pad(x, (around // 2, around - around // 2), self.pad)
        return F.conv1d(x, self.weight, self.bias, self.stride, dilation=self.dilation)


class ShortConv1d(_Kernel):
    """`[1, inner, time] -> [1, outer, time]`, zero-padded, for short inputs: one matrix product with a packed weight."""

    def __init__(self, inner: int, outer: int, taps: int, device: torch.device, *, bias: bool = True) -> None:
        super().__init__((outer, inner, taps), outer, device, bias, weight_norm=True)
        self.around = taps - 1
        self.packed: LinearWeight | None = None

    def packed_bytes(self, device: torch.device) -> int:
        outer, inner, taps = self.weight.shape
        return packed_weight_bytes(inner * taps, outer, self.bias is not None, self.weight.dtype, device)

    def pack(self) -> None:
        """Lay the weight out for its device and drop the original."""
        super().pack()
        self.packed = linear.pack(self.weight.flatten(1), self.bias)
        del self.weight
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed is not None
        return linear.linear(self._windows(x[0]), self.packed).T[None]

    def _windows(self, x: Tensor) -> Tensor:
        """Return the inputs of each result, `[time, inner * taps]`."""
        return F.pad(x, (self.around // 2, self.around // 2)).unfold(1, self.around + 1, 1).transpose(0, 1).flatten(1)


class LongConv1d(_Kernel):
    """`[1, inner, time] -> [1, outer, time]`, zero-padded, for long inputs, by `kernels.convolution`."""

    def __init__(self, inner: int, outer: int, taps: int, device: torch.device, *, dilation: int = 1) -> None:
        super().__init__((outer, inner, taps), outer, device, weight_norm=True)
        self.dilation = dilation
        self.packed: PackedFilter | None = None

    def packed_bytes(self, device: torch.device) -> int:
        assert self.bias is not None
        return packed_bytes(self.weight, device) + self.bias.nbytes

    def pack(self) -> None:
        """Lay the weight out for its device and drop the original."""
        super().pack()
        self.packed = pack(self.weight, self.dilation)
        del self.weight

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Convolve; `add`, of the result's shape, is added to it."""
        assert self.packed is not None
        return convolve(x, self.packed, self.bias, add)


class Upsample1d(_Kernel):
    """`[batch, inner, time] -> [batch, outer, stride * time]`.

    If `taps - stride` is odd, one more result is left out at the start than at the end. `groups`: of channels.
    """

    def __init__(
        self,
        inner: int,
        outer: int,
        taps: int,
        stride: int,
        device: torch.device,
        *,
        groups: int = 1,
        weight_norm: bool = False,
    ) -> None:
        super().__init__((inner, outer // groups, taps), outer, device, weight_norm=weight_norm)
        cut = taps - stride
        self.stride, self.groups, self.cut, self.longer = stride, groups, (cut + 1) // 2, cut % 2

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, self.weight, self.bias, self.stride, self.cut, self.longer, self.groups)


class Past:
    """The last inputs of layers that are computed part by part."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def append(self, layer: Hashable, x: Tensor, dim: int, count: int) -> Tensor:
        """Return the layer's kept inputs followed by `x`, and keep the last `count` of both along `dim`."""
        if not count:
            return x
        joined = torch.cat((self._kept[layer], x), dim) if layer in self._kept else x
        count = min(count, joined.shape[dim])
        self._kept[layer] = joined.narrow(dim, joined.shape[dim] - count, count).clone()
        return joined


class CausalConv1d(_Kernel):
    """`[1, inner, time] -> [1, outer, time]`, in groups of channels. Its tensors are stored below `conv`."""

    below = ".conv"

    def __init__(self, inner: int, outer: int, taps: int, device: torch.device, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__((outer, inner // groups, taps), outer, device)
        self.dilation, self.groups = dilation, groups

    def forward(self, x: Tensor, past: Past) -> Tensor:
        before = self.dilation * (self.weight.shape[2] - 1)
        joined = past.append(self, x, 2, before)
        joined = F.pad(joined, (before + x.shape[2] - joined.shape[2], 0))
        return F.conv1d(joined, self.weight, self.bias, dilation=self.dilation, groups=self.groups)


class CausalUpsample1d(_Kernel):
    """`[1, inner, time] -> [1, outer, stride * time]`. Its tensors are stored below `conv`.

    The first `taps - stride` results are left out. The published layer leaves out as many at the end, which are those that
    the next input would change.
    """

    below = ".conv"

    def __init__(self, inner: int, outer: int, taps: int, stride: int, device: torch.device) -> None:
        super().__init__((inner, outer, taps), outer, device)
        self.stride = stride

    def forward(self, x: Tensor, past: Past) -> Tensor:
        stride, taps, time = self.stride, self.weight.shape[2], x.shape[2]
        before = -(-taps // stride) - 1
        joined = past.append(self, x, 2, before)
        kept = joined.shape[2] - time
        wave = F.conv_transpose1d(F.pad(joined, (before - kept, 0)), self.weight, self.bias, stride)
        return wave[..., before * stride + max(0, taps - stride - kept * stride) : (before + time) * stride]
