"""The encoder of the Universal Speech Model (arXiv 2303.01037), as in Gemma: a conformer with windowed attention.

Two convolutions merge frames into a row, four as published. Each layer has two half-weighted MLPs around attention and a causal
convolution over time, with norms before and after each. Linear layers may clip their inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import check_activation, positive_int
from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import Norm, TensorModule
from ..layers.builder import Builder
from ..layers.clipped import ClippedLinear
from ..layers.convolution import add_depthwise_
from ..layers.linear import Linear
from ..memory_formulas import FLOAT32, SMALL, OpBytes

Sizes = tuple[tuple[int, int], tuple[int, int]]
_BLOCK = 32  # queries at a time
_MASKED = -1e9


@dataclass(frozen=True)
class UsmSpec:
    """Parameters of the encoder.

    Args:
        mels: mel bands. channels: output channels of the two convolutions. kernels, strides: of each, over time and over bands.
        taps: rows that the convolution over time sees, the row's own included.
        distances: number of rows that a row attends to, its own included. later: how many of them are after it.
        first_distance: the position in the table of sines of the last of these rows. signed: positions below 0 have sines, too.
        cap: soft cap of scores. half: weight of the MLPs. limit: bound of hidden states.
        clipped: linear layers store bounds of their inputs and outputs.
        out: width of the projected result; None: it is not projected.
        key_scale: factor of keys.
        cumulative: epsilon of norms over all frames so far after the convolutions (Gemma 3n); None: LayerNorm there.
        reduction: the result has the first of every `reduction` rows.
    """

    width: int
    heads: int
    layers: int
    channels: tuple[int, int]
    taps: int
    distances: int
    first_distance: int
    cap: float
    half: float
    limit: float
    act: str
    eps: float
    clipped: bool
    out: int | None
    key_scale: float = math.log(1 + math.e) / math.log(2)
    later: int = 0
    signed: bool = False
    mels: int = 128
    kernels: Sizes = ((3, 3), (3, 3))
    strides: Sizes = ((2, 2), (2, 2))
    cumulative: float | None = None
    reduction: int = 1

    @property
    def frames_per_row(self) -> int:
        return self.strides[0][0] * self.strides[1][0]

    def bands(self, convolutions: int = 2) -> int:
        """Return the bands after so many of the convolutions, each of which pads one band at both ends."""
        bands = self.mels
        for (_, kernel), (_, stride) in list(zip(self.kernels, self.strides, strict=True))[:convolutions]:
            bands = (bands + 2 - kernel) // stride + 1
        return bands

    def rows(self, frames: int) -> int:
        """Return the number of rows of an item after both convolutions."""
        return -(-frames // self.frames_per_row)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def usm_spec(audio: Mapping[str, Any], looks_at_edges: bool = False, **changes: Any) -> UsmSpec:
    """Read the raw `audio_config`; `changes` override fields of UsmSpec.

    `looks_at_edges`: the farthest rows of the context are not masked.

    Raises:
        ConfigError: a key is missing, or heads do not divide the width.
    """
    width, heads = positive_int(audio, "hidden_size"), positive_int(audio, "num_attention_heads")
    past, chunk = positive_int(audio, "attention_context_left") - 1, positive_int(audio, "attention_chunk_size")
    right = audio.get("attention_context_right") or 0
    if width % heads or width % 2 or type(right) is not int or right < 0 or past + looks_at_edges < 1:
        sizes = f"hidden_size {width}, {heads} heads, {past} past rows and {right} later ones"
        raise ConfigError(
            f"audio_config has {sizes}; heads must divide hidden_size, which is even, and rows attend to one or more"
        )
    later = right if looks_at_edges else max(right - 1, 0)
    first, second = audio["subsampling_conv_channels"]
    spec = UsmSpec(
        width=width,
        heads=heads,
        layers=positive_int(audio, "num_hidden_layers"),
        channels=(first, second),
        mels=first,
        taps=positive_int(audio, "conv_kernel_size"),
        distances=past + looks_at_edges + later,
        first_distance=(0 if looks_at_edges else (chunk + past + right) // 2 - past) - later,
        later=later,
        signed=looks_at_edges,
        cap=audio["attention_logit_cap"],
        half=audio["residual_weight"],
        limit=audio["gradient_clipping"],
        act=check_activation("audio hidden_act", audio["hidden_act"]),
        eps=audio["rms_norm_eps"],
        clipped=bool(audio["use_clipped_linears"]),
        out=positive_int(audio, "output_proj_dims") if audio["output_proj_dims"] else None,
    )
    return replace(spec, **changes)


class UsmMlp:
    """`[rows, width]` -> `[rows, width]`, the weighted output that the layer adds to its input."""

    def __init__(self, s: UsmSpec, build: Builder) -> None:
        self.spec = s
        self.norms = [build.norm(f"{side}_layer_norm", s.width, s.eps, False) for side in ("pre", "post")]
        self.up = ClippedLinear("ffw_layer_1", s.width, 4 * s.width, build, s.clipped)
        self.down = ClippedLinear("ffw_layer_2", 4 * s.width, s.width, build, s.clipped)

    def __call__(self, x: Tensor) -> Tensor:
        before, after = self.norms
        inner = activation(self.spec.act, self.up(before(_bounded(x, self.spec))))
        return after(_bounded_(self.down(inner), self.spec)).mul_(self.spec.half)


class UsmAttention:
    """Attention of each row to the last rows up to it. A bias of the scores depends on the query and the distance."""

    def __init__(self, s: UsmSpec, build: Builder) -> None:
        self.spec = s
        self.qkv = [ClippedLinear(name, s.width, s.width, build, s.clipped) for name in ("q_proj", "k_proj", "v_proj")]
        self.out = ClippedLinear("post", s.width, s.width, build, s.clipped)
        self.distance = build.linear(["relative_k_proj"], s.width, [s.width], False)
        self.scale = build.stored("per_dim_scale", s.head_dim)

    def __call__(self, x: Tensor, lengths: Sequence[int], sines: Tensor) -> Tensor:
        s = self.spec
        q, k, v = (linear(x).float().view(-1, s.heads, s.head_dim) for linear in self.qkv)
        q = q * (s.head_dim**-0.5 / math.log(2)) * F.softplus(self.scale.weight.float())
        k = k * s.key_scale
        table = self.distance(sines).float().view(-1, s.heads, s.head_dim).permute(1, 2, 0)  # [heads, dim, distances]
        items = zip(*(part.split(list(lengths)) for part in (q, k, v)), strict=True)
        attended = [self._attend(qs, ks, vs, table) for qs, ks, vs in items]
        return self.out(torch.cat(attended).to(x.dtype))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        """Attend within one item: float32 `[rows, heads, dim]` -> `[rows, width]`."""
        s, n, past = self.spec, len(q), self.spec.distances - 1 - self.spec.later
        blocks = -(-n // _BLOCK)
        after, context = blocks * _BLOCK - n, _BLOCK + s.distances - 1
        q = F.pad(q, (0, 0, 0, 0, 0, after)).view(blocks, _BLOCK, s.heads, -1).transpose(1, 2)  # [blocks, heads, queries, dim]
        sides = (0, 0, 0, 0, past, after + s.later)
        k, v = (F.pad(part, sides).unfold(0, context, _BLOCK) for part in (k, v))  # [blocks, heads, dim, keys]
        key = torch.arange(context, device=q.device)
        place = torch.arange(_BLOCK, device=q.device)[:, None] + (s.distances - 1) - key  # in the table, [queries, keys]
        index = place.clamp(0, s.distances - 1).expand(blocks, s.heads, -1, -1)
        scores = (q @ k).add_((q @ table).gather(-1, index))
        scores.div_(s.cap).tanh_().mul_(s.cap).masked_fill_((place < 0) | (place >= s.distances), _MASKED)
        row = torch.arange(blocks, device=q.device)[:, None] * _BLOCK + key - past  # [blocks, keys]
        scores.masked_fill_(((row < 0) | (row >= n))[:, None, None], _MASKED)
        return (scores.softmax(-1) @ v.transpose(2, 3)).transpose(1, 2).reshape(blocks * _BLOCK, -1)[:n]


class UsmConvolution:
    """A causal depthwise convolution over time, between a gated linear layer and another one."""

    def __init__(self, s: UsmSpec, build: Builder) -> None:
        self.spec = s
        self.norms = [build.norm(name, s.width, s.eps, False) for name in ("pre_layer_norm", "conv_norm")]
        self.first = ClippedLinear("linear_start", s.width, 2 * s.width, build, s.clipped)
        self.kernel = build.stored("depthwise_conv1d.weight", s.width, 1, s.taps)
        self.last = ClippedLinear("linear_end", s.width, s.width, build, s.clipped)

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x, gate = self.first(self.norms[0](x)).chunk(2, -1)
        for item in gate.split(list(lengths)):  # per item: sigmoid's bits depend on how threads split a tensor
            item.sigmoid_()
        x = x * gate
        del gate
        out = torch.zeros_like(x)
        add_depthwise_(out, x, self.kernel.weight, lengths, self.spec.taps - 1)
        return self.last(activation(self.spec.act, self.norms[1](_bounded_(out, self.spec))))


class UsmLayer:
    def __init__(self, s: UsmSpec, build: Builder) -> None:
        self.spec = s
        self.mlps = [UsmMlp(s, build.scope(f"feed_forward{i}")) for i in (1, 2)]
        self.attention = UsmAttention(s, build.scope("self_attn"))
        self.convolution = UsmConvolution(s, build.scope("lconv1d"))
        names = ("norm_pre_attn", "self_attn.post_norm", "norm_out")
        self.norms = [build.norm(name, s.width, s.eps, False) for name in names]

    def __call__(self, x: Tensor, lengths: Sequence[int], sines: Tensor) -> Tensor:
        before, after, last = self.norms
        x = x + self.mlps[0](x)
        attended = self.attention(before(_bounded(x, self.spec)), lengths, sines)
        x += after(_bounded_(attended, self.spec))
        del attended
        x += self.convolution(x, lengths)
        x += self.mlps[1](x)
        return last(_bounded_(x, self.spec))


class UsmConvolutionBlock(TensorModule):
    """A convolution over time and mel bands: `[frames, bands, inner]` -> `[frames / stride, bands / stride, outer]`.

    `number`: of the convolution, 0 or 1.
    """

    def __init__(self, inner: int, outer: int, spec: UsmSpec, number: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.cumulative = spec.cumulative
        self.kernel, self.stride = spec.kernels[number], spec.strides[number]
        self.conv = Linear(self.kernel[0] * self.kernel[1] * inner, {"conv": outer}, False, dtype, device)
        self.norm = Norm(outer, spec.eps, False, dtype, device, centered=self.cumulative is None)
        self.norm.takes_adapters = self.cumulative is None

    def forward(self, x: Tensor) -> Tensor:
        time = (1, 1) if self.cumulative is None else (0, self.kernel[0] - 1)
        windows = F.pad(x, (0, 0, 1, 1, *time))
        for axis, (kernel, stride) in enumerate(zip(self.kernel, self.stride, strict=True)):
            windows = windows.unfold(axis, kernel, stride)  # at last [frames, bands, inner, kernel, kernel]
        shape, rows = windows.shape[:2], windows.reshape(-1, windows[0, 0].numel())
        del windows
        out = self.conv(rows)
        del rows
        out = (
            self.norm(out) if self.cumulative is None else _norm_cumulatively(out.view(*shape, -1), self.norm, self.cumulative)
        )
        return out.relu_().view(*shape, -1)


def _norm_cumulatively(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """Norm each frame of `x [frames, bands, channels]` by mean and variance over all frames up to it."""
    wide = x.float()
    counts = torch.arange(1, len(x) + 1, device=x.device) * x[0].numel()
    wide = wide - (wide.sum((1, 2)).cumsum(0) / counts)[:, None, None]
    variance = wide.square().sum((1, 2)).cumsum(0) / counts
    return wide.mul_((variance + eps).rsqrt_()[:, None, None]).mul_(norm.weight.float()).to(x.dtype)


class Usm(TensorModule):
    """Log-mel frames of items, concatenated, `[frames, bands]` -> `[rows, out]`."""

    def __init__(self, spec: UsmSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, build = spec, dtype, Builder(self, dtype, device)
        first, second = spec.channels
        self.subsample_conv_projection = nn.Module()
        self.blocks = (
            UsmConvolutionBlock(1, first, spec, 0, dtype, device),
            UsmConvolutionBlock(first, second, spec, 1, dtype, device),
        )
        for i, block in enumerate(self.blocks):
            self.subsample_conv_projection.add_module(f"layer{i}", block)
        name = "subsample_conv_projection.input_proj_linear"
        self.join = (build.linear([name], spec.bands() * second, [spec.width], False),)
        self.layer_list = [UsmLayer(spec, build.scope(f"layers.{i}")) for i in range(spec.layers)]
        self.last = () if spec.out is None else (build.linear(["output_proj"], spec.width, [spec.out], True),)
        self.sines = _sines(spec).to(device, dtype)

    def forward(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        rows = [self.spec.rows(n) for n in frames]
        x = torch.cat([self._rows(item) for item in features.to(self.dtype).split(list(frames))])
        for layer in self.layer_list:
            x = layer(x, rows, self.sines)
        if self.spec.reduction > 1:
            x = torch.cat([item[:: self.spec.reduction] for item in x.split(rows)])
        return self.last[0](x) if self.last else x

    def _rows(self, frames: Tensor) -> Tensor:
        first, second = self.blocks
        return self.join[0](second(first(frames[..., None])).flatten(1))


def _sines(s: UsmSpec) -> Tensor:
    """Return sines and cosines of each distance, the last later row's first, float32 `[distances, width]`."""
    count = s.width // 2
    scales = torch.exp(torch.arange(count) * -(math.log(10000.0) / max(count - 1, 1)))
    positions = (torch.arange(s.distances) + s.first_distance)[:, None]
    sines = torch.cat(((positions * scales).sin(), (positions * scales).cos()), 1)
    return sines if s.signed else sines.masked_fill(positions < 0, 0)  # the published table begins at 0


def _bounded(x: Tensor, s: UsmSpec) -> Tensor:
    limit = min(s.limit, torch.finfo(x.dtype).max)
    return x.clamp(-limit, limit)


def _bounded_(x: Tensor, s: UsmSpec) -> Tensor:
    limit = min(s.limit, torch.finfo(x.dtype).max)
    return x.clamp_(-limit, limit)


def usm_bytes(c: UsmSpec, rows: int, most: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in Usm for `rows` rows, inputs included. `most`: rows of the largest item."""
    ops, s, w, longest = OpBytes(dtype, limits), dtype.itemsize, c.width, min(rows, most)
    frames, (first, second), (kernel, next_kernel) = c.frames_per_row * longest, c.channels, c.kernels
    later_frames = -(-frames // c.strides[0][0])
    early, late = later_frames * c.bands(1), longest * c.bands()  # outputs of a channel after each convolution
    taps, next_taps = math.prod(kernel), math.prod(next_kernel) * first
    padded = (frames + kernel[0]) * (c.mels + 2)
    begin = early * taps * s + max(padded * s, early * ops.linear(taps, first, early))
    begin = max(begin, early * first * 2 * s + early * 2 * FLOAT32)
    padded = (later_frames + next_kernel[0]) * (c.bands(1) + 2) * first
    middle = (early * first + late * next_taps) * s + max(padded * s, late * ops.linear(next_taps, second, late))
    clip = c.clipped * w * s
    mlp = w * s + max(clip + ops.linear(w, 4 * w, rows), 8 * w * s, 4 * w * s * (1 + c.clipped) + ops.linear(4 * w, w, rows))
    blocks = -(-longest // _BLOCK)
    scores = c.heads * _BLOCK * (_BLOCK + c.distances - 1)  # of a block
    places = 2 * c.heads * c.distances * _BLOCK  # scores of distances
    attention = rows * (w * s + 5 * w * FLOAT32) + blocks * (3 * scores + places) * FLOAT32
    layers = rows * w * s + max(rows * (w * s + mlp), attention)
    return SMALL + c.frames_per_row * rows * c.mels * s + max(rows * w * s + max(begin, middle), layers)
