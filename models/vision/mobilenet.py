"""MobileNetV5, an image encoder of convolutions in stages, with multi-query attention in the later ones.

Every stage halves the sides of its plane. The planes of the last two stages are joined, projected and averaged to rows of the
result. Planes are `[side, side, channels]`. Images are encoded one at a time: planes of the first stages are large.

Sources: arXiv 2404.10518 (the blocks, from MobileNetV4); timm's `mobilenetv5_300m_enc` (their order, the fusion of planes).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import Converter, Convertible, TensorModule
from ..layers.builder import Builder
from ..layers.convolution import copies_planes, copies_results, depthwise_planes
from ..memory_formulas import OpBytes
from .mobilenet_spec import BlockSpec, EdgeSpec, InvertedSpec, MobileAttentionSpec, MobileNetSpec, expanded

_ACT, _EPS, _FUSED_RATIO, _STEM_KERNEL = "gelu_pytorch_tanh", 1e-6, 2, 3


class ConvolutionNorm:
    """A convolution as one product, and a norm: `[side, side, inner]` -> `[side / stride, side / stride, outer]`."""

    def __init__(
        self, names: tuple[str, str], shape: tuple[int, int], build: Builder, kernel: int = 1, stride: int = 1, act: bool = True
    ) -> None:
        inner, outer = shape
        self.kernel, self.stride, self.act = kernel, stride, act
        self.layer = build.linear([names[0]], inner * kernel**2, [outer], bias=names[0].startswith("conv_stem"))
        self.norm = build.norm(names[1], outer, _EPS, False)

    def __call__(self, x: Tensor) -> Tensor:
        side = -(-len(x) // self.stride)
        return _normed(self.layer(_windows(x, self.kernel, self.stride)), self.norm, self.act).view(side, side, -1)


class DepthwiseNorm:
    """A convolution of each channel by itself, and a norm."""

    def __init__(self, names: tuple[str, str], width: int, kernel: int, stride: int, build: Builder, act: bool = False) -> None:
        self.stride, self.act = stride, act
        self.kernel = build.stored(f"{names[0]}.weight", width, 1, kernel, kernel)
        self.norm = build.norm(names[1], width, _EPS, False)

    def __call__(self, x: Tensor) -> Tensor:
        return _normed(_depthwise(x, self.kernel.weight, self.stride), self.norm, self.act)


def _named(name: str) -> tuple[str, str]:
    """Return the names of a convolution and its norm."""
    return f"{name}.conv", f"{name}.bn"


def _normed(x: Tensor, norm: TensorModule, act: bool) -> Tensor:
    x = norm(x)
    return activation(_ACT, x) if act else x


def _padded(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad a plane with zeros, so that a convolution returns `side / stride`, rounded up; the end gets the odd one."""
    side = len(x)
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return F.pad(x, (0, 0, *[total // 2, total - total // 2] * 2)) if total else x


def _windows(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Return the inputs of a convolution, `[outputs, kernel^2 * channels]`."""
    if kernel == 1:
        return x.flatten(0, 1)
    windows = _padded(x, kernel, stride).unfold(0, kernel, stride).unfold(1, kernel, stride)
    return windows.permute(0, 1, 3, 4, 2).reshape(-1, kernel**2 * x.shape[2])


def _depthwise(x: Tensor, kernel: Tensor, stride: int) -> Tensor:
    """Convolve each channel with its `kernel [channels, 1, k, k]`."""
    plane = _padded(x, kernel.shape[-1], stride)[None].permute(0, 3, 1, 2)
    if copies_planes(plane.device, plane.dtype):
        plane = plane.contiguous()
    return depthwise_planes(plane, kernel, stride)[0].permute(1, 2, 0).contiguous()


class EdgeBlock:
    """`[side, side, inner]` -> `[side / stride, side / stride, width]`, like the other blocks."""

    def __init__(self, inner: int, s: EdgeSpec, build: Builder) -> None:
        self.skips, wide = s.stride == 1 and inner == s.width, expanded(inner, s)
        self.first = ConvolutionNorm(("conv_exp", "bn1"), (inner, wide), build, s.kernel, s.stride)
        self.second = ConvolutionNorm(("conv_pwl", "bn2"), (wide, s.width), build, act=False)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y.add_(x) if self.skips else y


class InvertedBlock:
    """Products between depthwise convolutions, with a factor per channel."""

    def __init__(self, inner: int, s: InvertedSpec, build: Builder) -> None:
        self.skips, wide = s.stride == 1 and inner == s.width, expanded(inner, s)
        early = 1 if s.middle else s.stride
        self.layers: list[ConvolutionNorm | DepthwiseNorm] = []
        if s.start:
            self.layers.append(DepthwiseNorm(_named("dw_start"), inner, s.start, early, build))
        self.layers.append(ConvolutionNorm(_named("pw_exp"), (inner, wide), build))
        if s.middle:
            self.layers.append(DepthwiseNorm(_named("dw_mid"), wide, s.middle, s.stride, build, act=True))
        self.layers.append(ConvolutionNorm(_named("pw_proj"), (wide, s.width), build, act=False))
        self.factor = build.stored("layer_scale.gamma", s.width)

    def __call__(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        y *= self.factor.weight
        return y.add_(x) if self.skips else y


class AttentionBlock:
    """Multi-query attention over all positions of a plane, after a norm and with a factor per channel."""

    def __init__(self, inner: int, s: MobileAttentionSpec, build: Builder) -> None:
        self.dim = s.dim
        self.norm = build.norm("norm", inner, _EPS, False)
        self.query = build.linear(["attn.query.proj"], inner, [s.heads * s.dim], False)
        self.key, self.value = (KeyPart(inner, s, build.scope(f"attn.{name}")) for name in ("key", "value"))
        self.out = build.linear(["attn.output.proj"], s.heads * s.dim, [s.width], False)
        self.factor = build.stored("layer_scale.gamma", s.width)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._attended(self.norm(x))
        return self.out(y).view(x.shape).mul_(self.factor.weight).add_(x)

    def _attended(self, x: Tensor) -> Tensor:
        """Attend; all heads read the same keys, so that they are further queries of one head."""
        k, v = self.key(x), self.value(x)
        q = self.query(x.flatten(0, 1)).view(-1, self.dim)
        rows = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])
        return rows.view(x.shape[0] * x.shape[1], -1)


class KeyPart:
    """The keys or the values of a plane: `[side, side, inner]` -> `[keys, dim]`."""

    def __init__(self, inner: int, s: MobileAttentionSpec, build: Builder) -> None:
        strided = s.kv_stride > 1
        self.down = DepthwiseNorm(("down_conv", "norm"), inner, s.kernel, s.kv_stride, build) if strided else None
        self.project = build.linear(["proj"], inner, [s.dim], False)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project((x if self.down is None else self.down(x)).flatten(0, 1))


class Fusion:
    """The planes of the last two stages -> the rows of the result."""

    def __init__(self, s: MobileNetSpec, build: Builder) -> None:
        self.side, wide, ffn = s.side, _FUSED_RATIO * s.fused, build.scope("ffn")
        self.first = ConvolutionNorm(_named("pw_exp"), (s.fused, wide), ffn)
        self.second = ConvolutionNorm(_named("pw_proj"), (wide, s.out), ffn, act=False)
        self.norm = build.norm("norm", s.out, _EPS, False)

    def __call__(self, large: Tensor, small: Tensor) -> Tensor:
        x = self.second(self.first(_joined(large, small)))
        squares = F.avg_pool2d(x[None].permute(0, 3, 1, 2), len(x) // self.side)  # `mean` would copy to float32
        return self.norm(squares[0].permute(1, 2, 0).reshape(self.side**2, -1))


def _joined(large: Tensor, small: Tensor) -> Tensor:
    """Join the channels of two planes, of which the second has half the side."""
    return torch.cat((large, small.repeat_interleave(2, 0).repeat_interleave(2, 1)), 2)


class MobileNet(TensorModule, Convertible):
    """Patches of images, row by row, `[images * side^2, patch_dim]` -> `[images * side^2, out]`."""

    def __init__(self, spec: MobileNetSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, build = spec, Builder(self, dtype, device)
        self.stem = (ConvolutionNorm(_named("conv_stem"), (3, spec.stem), build, _STEM_KERNEL, 2),)
        self.stages, inner = list[list[EdgeBlock | InvertedBlock | AttentionBlock]](), spec.stem
        for i, stage in enumerate(spec.stages):
            self.stages.append([])
            for j, block in enumerate(stage):
                self.stages[i].append(_block(inner, block, build.scope(f"blocks.{i}.{j}")))
                inner = block.width
        self.fusion = (Fusion(spec, build.scope("msfa")),)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Reorder the weights of convolutions."""
        edges = [
            f"blocks.{i}.{j}.conv_exp"
            for i, stage in enumerate(self.spec.stages)
            for j, block in enumerate(stage)
            if isinstance(block, EdgeSpec)
        ]
        for name in (f"{path}.{edge}.weight" for edge in ("conv_stem.conv", *edges)):
            yield name, _window_order(name)

    def forward(self, patches: Tensor) -> Tensor:
        return torch.cat([self._encode(image) for image in patches.split(self.spec.side**2)])

    def _encode(self, patches: Tensor) -> Tensor:
        """Encode the patches of one image."""
        s, planes = self.spec, []
        squares = patches.view(s.side, s.side, 3, s.patch, s.patch).permute(0, 3, 1, 4, 2)
        x = self.stem[0](squares.reshape(s.size, s.size, 3))
        for i, stage in enumerate(self.stages):
            for block in stage:
                x = block(x)
            planes += [x] * (i >= len(self.stages) - 2)
        return self.fusion[0](*planes)


def _window_order(name: str) -> Converter:
    """Bring a weight `[outer, inner, k, k]` into the order of `_windows`."""
    return lambda tensor: [(name, tensor.permute(0, 2, 3, 1).flatten(1))]


def _block(inner: int, spec: BlockSpec, build: Builder) -> EdgeBlock | InvertedBlock | AttentionBlock:
    if isinstance(spec, EdgeSpec):
        return EdgeBlock(inner, spec, build)
    return InvertedBlock(inner, spec, build) if isinstance(spec, InvertedSpec) else AttentionBlock(inner, spec, build)


def mobilenet_bytes(c: MobileNetSpec, images: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in MobileNet for this many images, without their patches."""
    ops, s, side, inner = OpBytes(dtype, limits), dtype.itemsize, c.size // 2, c.stem
    result, large = c.side**2 * c.out * s, 0
    peak = c.size**2 * 3 * s + _convolution_bytes(3, inner, c.size, ops, _STEM_KERNEL, 2)
    for i, stage in enumerate(c.stages):
        for block in stage:
            plane = side**2 * inner * s
            peak = max(peak, large * (large != plane) + plane + _block_bytes(block, inner, side, ops))
            side, inner = side // block.stride, block.width
        large = side**2 * inner * s if i == len(c.stages) - 2 else 0
    return max((images - 1) * result + max(peak, _fusion_bytes(c, ops)), 2 * images * result)


def _block_bytes(block: BlockSpec, inner: int, side: int, ops: OpBytes) -> int:
    """Return the bytes alive in a block beside its input."""
    if isinstance(block, MobileAttentionSpec):
        return _attention_bytes(block, inner, side, ops)
    s, wide, after, most, plane = ops.dtype.itemsize, expanded(inner, block), side // block.stride, 0, 0
    if isinstance(block, EdgeSpec):
        first = _convolution_bytes(inner, wide, side, ops, block.kernel, block.stride)
        return max(first, after**2 * wide * s + _convolution_bytes(wide, block.width, after, ops))
    before = side if block.middle else after
    if block.start:
        most, plane = _depthwise_bytes(inner, side, block.start, side // before, ops), before**2 * inner * s
    most, plane = max(most, plane + _convolution_bytes(inner, wide, before, ops)), before**2 * wide * s
    if block.middle:
        most = max(most, plane + _depthwise_bytes(wide, before, block.middle, block.stride, ops))
    return max(most, after**2 * wide * s + _convolution_bytes(wide, block.width, after, ops))


def _attention_bytes(block: MobileAttentionSpec, inner: int, side: int, ops: OpBytes) -> int:
    """Return the bytes alive in AttentionBlock beside its input."""
    s, rows, small = ops.dtype.itemsize, side**2, -(-side // block.kv_stride)
    width, keys = block.heads * block.dim, small**2
    key, part, down = keys * ops.linear_result(block.dim, keys), keys * ops.linear(inner, block.dim, keys), 0
    if block.kv_stride > 1:
        down = keys * inner * s
        part = max(down + part, _depthwise_bytes(inner, side, block.kernel, block.kv_stride, ops))
    query = 2 * key + rows * ops.linear(inner, width, rows)
    copies = 0 if ops.dtype == torch.float32 else 2 * keys * block.dim * s
    tiles = ops.torch_attention_tiles(rows * block.heads, block.dim, keys)
    attend = 2 * key + rows * (ops.linear_result(width, rows) + width * s) + copies + tiles
    normed = rows * inner * s
    out = rows * (width * s + ops.linear(width, block.width, rows))
    return max(rows * ops.norm(inner, True), normed + max(key + part, query, attend), out)


def _fusion_bytes(c: MobileNetSpec, ops: OpBytes) -> int:
    """Return the bytes alive in Fusion, with both planes."""
    s, rows, wide = ops.dtype.itemsize, c.fused_side**2, _FUSED_RATIO * c.fused
    large, small = (rows * stage[-1].width * s for stage in c.stages[-2:])
    joined, convolve = large + small, partial(_convolution_bytes, side=c.fused_side, ops=ops)
    first, second = joined + convolve(c.fused, wide), rows * wide * s + convolve(wide, c.out)
    result = c.side**2 * c.out
    last = rows * c.out * s + result * s + c.side**2 * ops.norm(c.out, True)
    return large + small // 4 + max(small + joined, first, second, last)


def _convolution_bytes(inner: int, outer: int, side: int, ops: OpBytes, kernel: int = 1, stride: int = 1) -> int:
    """Return the bytes alive in ConvolutionNorm beside its input."""
    s, rows, inputs = ops.dtype.itemsize, (-(-side // stride)) ** 2, kernel**2 * inner
    windows = rows * inputs * s if kernel > 1 else 0
    multiply = rows * ops.linear(inputs, outer, rows)
    norm = rows * (ops.linear_result(outer, rows) + max(ops.norm(outer, True), outer * s))
    return max(windows + max(_padded_bytes(inner, side, kernel, stride, s), multiply), norm)


def _depthwise_bytes(width: int, side: int, kernel: int, stride: int, ops: OpBytes) -> int:
    """Return the bytes alive in DepthwiseNorm beside its input."""
    s, rows = ops.dtype.itemsize, (-(-side // stride)) ** 2
    norm = rows * (width * s + ops.norm(width, True))
    copies = 2 if copies_planes(ops.limits.device, ops.dtype) else 1
    copied = copies_results(ops.limits.device, s)
    return max(copies * _padded_bytes(width, side, kernel, stride, s) + (copies + copied) * rows * width * s, norm)


def _padded_bytes(width: int, side: int, kernel: int, stride: int, s: int) -> int:
    return 0 if kernel == 1 else ((-(-side // stride) - 1) * stride + kernel) ** 2 * width * s
