"""MobileNetV5 as the oracle of the tests, composed after the description of timm's `mobilenetv5_300m_enc`.

timm's own class, which transformers uses, is compared with it where timm is installed (tests/models/test_mobilenet.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EDGE = {"block_type": "er", "act_layer": None, "exp_kernel_size": 3}
INVERTED = {"block_type": "uir", "act_layer": None, "dw_kernel_size_mid": 0}
ATTENTION = {"block_type": "mqa", "act_layer": None, "dw_kernel_size": 3, "num_heads": 4, "key_dim": 8, "value_dim": 8}
BLOCKS: list[list[dict[str, Any]]] = [
    [
        {**EDGE, "out_chs": 16, "stride": 2, "exp_ratio": 4.0},
        {**EDGE, "out_chs": 16, "stride": 1, "exp_ratio": 2.0},
    ],
    [
        {**INVERTED, "out_chs": 24, "stride": 2, "exp_ratio": 6.0, "dw_kernel_size_start": 3, "dw_kernel_size_mid": 5},
        {**INVERTED, "out_chs": 24, "stride": 1, "exp_ratio": 4.0, "dw_kernel_size_start": 5},
    ],
    [
        {**INVERTED, "out_chs": 32, "stride": 2, "exp_ratio": 4.0, "dw_kernel_size_start": 5, "dw_kernel_size_mid": 5},
        {**ATTENTION, "out_chs": 32, "stride": 1, "kv_stride": 2},
        {**INVERTED, "out_chs": 32, "stride": 1, "exp_ratio": 1.0},
    ],
    [
        {**INVERTED, "out_chs": 40, "stride": 2, "exp_ratio": 2.0, "dw_kernel_size_start": 5},
        {**ATTENTION, "out_chs": 40, "stride": 1, "kv_stride": 1},
        {**INVERTED, "out_chs": 40, "stride": 1, "exp_ratio": 2.0},
    ],
]
"""Small stages, as the `block_args` of timm."""


class Convolution(nn.Conv2d):
    """A convolution whose input is padded as TensorFlow's "same"."""

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        edges: list[int] = []
        for side in (x.shape[3], x.shape[2]):
            outputs = -(-side // stride)
            missing = max(0, (outputs - 1) * stride + kernel - side)
            edges += [missing // 2, missing - missing // 2]
        return F.conv2d(F.pad(x, edges), self.weight, self.bias, self.stride, groups=self.groups)


class Norm(nn.Module):
    def __init__(self, channels: int, act: bool = False) -> None:
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.ones(channels)), act

    def forward(self, x: Tensor) -> Tensor:
        x = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * self.weight[:, None, None]
        return F.gelu(x, approximate="tanh") if self.act else x


def normed(
    inner: int, outer: int, kernel: int = 1, stride: int = 1, act: bool = False, groups: int = 1, bias: bool = False
) -> nn.Module:
    layer = nn.Sequential()
    layer.add_module("conv", Convolution(inner, outer, kernel, stride, groups=groups, bias=bias))
    layer.add_module("bn", Norm(outer, act))
    return layer


class Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma[:, None, None]


class Edge(nn.Module):
    def __init__(self, inner: int, c: dict[str, Any]) -> None:
        super().__init__()
        wide, outer = int(inner * c["exp_ratio"]), c["out_chs"]
        self.skips = c["stride"] == 1 and inner == outer
        self.conv_exp = Convolution(inner, wide, c["exp_kernel_size"], c["stride"], bias=False)
        self.bn1, self.bn2 = Norm(wide, True), Norm(outer)
        self.conv_pwl = Convolution(wide, outer, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv_pwl(self.bn1(self.conv_exp(x))))
        return y + x if self.skips else y


class Inverted(nn.Module):
    def __init__(self, inner: int, c: dict[str, Any], scaled: bool = True) -> None:
        super().__init__()
        wide, outer, stride = int(inner * c["exp_ratio"]), c["out_chs"], c["stride"]
        start, middle = c.get("dw_kernel_size_start", 0), c["dw_kernel_size_mid"]
        self.skips = scaled and stride == 1 and inner == outer
        self.dw_start = normed(inner, inner, start, 1 if middle else stride, groups=inner) if start else nn.Identity()
        self.pw_exp = normed(inner, wide, act=True)
        self.dw_mid = normed(wide, wide, middle, stride, True, wide) if middle else nn.Identity()
        self.pw_proj = normed(wide, outer)
        self.layer_scale = Scale(outer) if scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer_scale(self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x)))))
        return y + x if self.skips else y


class Attention(nn.Module):
    def __init__(self, inner: int, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, dim, kernel, stride = c["num_heads"], c["key_dim"], c["dw_kernel_size"], c["kv_stride"]
        self.norm, self.attn, self.layer_scale = Norm(inner), nn.Module(), Scale(inner)
        for name, outer in (("query", self.heads * dim), ("key", dim), ("value", dim)):
            part = nn.Sequential()
            if stride > 1 and name != "query":
                part.add_module("down_conv", Convolution(inner, inner, kernel, stride, groups=inner, bias=False))
                part.add_module("norm", Norm(inner))
            part.add_module("proj", Convolution(inner, outer, 1, bias=False))
            self.attn.add_module(name, part)
        self.attn.output = nn.Sequential()
        self.attn.output.add_module("proj", Convolution(self.heads * dim, inner, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y, a = self.norm(x), self.attn
        q, k, v = a.query(y).unflatten(1, (self.heads, -1)).flatten(3), a.key(y).flatten(2), a.value(y).flatten(2)
        weights = (torch.einsum("bhdq,bdk->bhqk", q, k) / q.shape[2] ** 0.5).softmax(-1)
        out = torch.einsum("bhqk,bdk->bhdq", weights, v).flatten(1, 2).unflatten(2, x.shape[2:])
        return x + self.layer_scale(a.output(out))


class MobileNet(nn.Module):
    """Pixels `[images, 3, side, side]` -> `[images, out, rows, rows]`."""

    def __init__(self, blocks: list[list[dict[str, Any]]], rows: int, stem: int = 64, out: int = 2048) -> None:
        super().__init__()
        kinds = {"er": Edge, "uir": Inverted, "mqa": Attention}
        self.rows, self.conv_stem, self.blocks = rows, normed(3, stem, 3, 2, True, bias=True), nn.Sequential()
        inner = stem
        for stage in blocks:
            self.blocks.append(nn.Sequential())
            for block in stage:
                self.blocks[-1].append(kinds[block["block_type"]](inner, block))
                inner = block["out_chs"]
        fused = {**INVERTED, "out_chs": out, "stride": 1, "exp_ratio": 2.0}
        self.msfa = nn.Module()
        self.msfa.ffn = Inverted(blocks[-2][-1]["out_chs"] + inner, fused, scaled=False)
        self.msfa.norm = Norm(out)

    def forward(self, pixels: Tensor) -> Tensor:
        x, planes = self.conv_stem(pixels), []
        for stage in self.blocks:
            x = stage(x)
            planes.append(x)
        large, small = planes[-2:]
        x = self.msfa.ffn(torch.cat([large, F.interpolate(small, size=large.shape[2:], mode="nearest")], 1))
        return self.msfa.norm(F.avg_pool2d(x, x.shape[2] // self.rows))
