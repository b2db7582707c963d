"""The conformer of FireRedASR2: convolutions merge four frames into a row, layers norm queries, keys and values separately.

Source: the publisher's code, as vLLM's class describes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...audio.conformer import EPS, ConformerConvolution, ConformerMlp, ConformerMlpSpec, ConvolutionNames, ConvolutionSpec
from ...audio.fastconformer import distance_attention, distance_attention_bytes, distance_sines, distance_sines_bytes
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...memory_formulas import SMALL, OpBytes

REDUCTION = 4  # frames per row
MOST_FRAMES = 3000  # of an item
_CHANNELS = 32
_ROWS = 16  # rows at a time in the convolutions that merge frames
_PADDING = 6  # frames of zeros after an item, which its last row sees
_NAMES = ConvolutionNames("pre_layer_norm", "pointwise_conv1", "depthwise_conv", "batch_norm", "pointwise_conv2")


@dataclass(frozen=True)
class FireRedEncoderSpec:
    """The encoder. `taps`: rows that the convolution over time sees."""

    mels: int
    width: int
    heads: int
    layers: int
    taps: int

    @property
    def merged(self) -> int:
        """Bands after the two convolutions that merge frames."""
        return ((self.mels - 1) // 2 - 1) // 2

    @property
    def inner(self) -> int:
        """Width of the MLPs."""
        return 4 * self.width


def num_rows(frames: int) -> int:
    """Return the number of rows of an item of `frames` frames."""
    return -(-frames // REDUCTION)


def fire_red_encoder_spec(audio: Mapping[str, Any]) -> FireRedEncoderSpec:
    """Read `audio_encoder_conf`; ConfigError for a value that is missing or not supported."""
    audio = {"kernel_size": 33, **audio}
    sizes = ("idim", "d_model", "n_head", "n_layers_enc", "kernel_size")
    spec = FireRedEncoderSpec(*(positive_int(audio, key) for key in sizes))
    if spec.width % spec.heads or spec.width % 2:
        raise ConfigError(f"d_model {spec.width} of audio_encoder_conf is odd or not a multiple of n_head {spec.heads}")
    if not spec.taps % 2:
        raise ConfigError(f"kernel_size {spec.taps} of audio_encoder_conf is even; give an odd number")
    if spec.merged < 1:
        raise ConfigError(f"idim {spec.mels} of audio_encoder_conf is below 7, which two convolutions of stride 2 need")
    return spec


class FireRedMerger:
    """Frames `[n, mels]` of one item -> `[rows, width]`, by two convolutions of stride 2 without padding."""

    def __init__(self, s: FireRedEncoderSpec, build: Builder) -> None:
        self.first = build.linear(["conv.0"], 9, [_CHANNELS], True)
        self.second = build.linear(["conv.2"], 9 * _CHANNELS, [_CHANNELS], True)
        self.join = build.linear(["out"], _CHANNELS * s.merged, [s.width], True)

    def __call__(self, frames: Tensor) -> Tensor:
        rows, frames = num_rows(len(frames)), F.pad(frames, (0, 0, 0, _PADDING))
        return torch.cat([self._merge(frames, first, min(first + _ROWS, rows)) for first in range(0, rows, _ROWS)])

    def _merge(self, frames: Tensor, first: int, last: int) -> Tensor:
        """Return rows `[first, last)`: a few at a time, because the convolutions have many results per row."""
        windows = frames[REDUCTION * first : REDUCTION * last + 3].unfold(0, 3, 2).unfold(1, 3, 2)  # [2 rows + 1, bands, 3, 3]
        x = self.first(windows.reshape(-1, 9)).relu_().view(*windows.shape[:2], -1)
        windows = x.unfold(0, 3, 2).unfold(1, 3, 2)  # [rows, bands, channels, 3, 3]
        x = self.second(windows.reshape(-1, 9 * _CHANNELS)).relu_().view(*windows.shape[:2], -1)
        return self.join(x.transpose(1, 2).flatten(1))


class FireRedAttention:
    """Attention of each row to all rows of its item. Queries, keys and values have norms of their own."""

    def __init__(self, s: FireRedEncoderSpec, build: Builder) -> None:
        self.shape, w, build = (s.heads, s.width // s.heads), s.width, build.scope("mhsa")
        self.norms = [build.norm(f"layer_norm_{part}", w, EPS, True) for part in "qkv"]
        self.projections = [build.linear([f"w_{part}s"], w, [w], False) for part in "qkv"]
        self.distance = build.linear(["linear_pos"], w, [w], False)
        self.biases = build.stored("pos_bias_u", *self.shape), build.stored("pos_bias_v", *self.shape)
        self.out = build.linear(["fc"], w, [w], False)

    def __call__(self, x: Tensor, lengths: Sequence[int], sines: Tensor) -> Tensor:
        qkv = x.new_empty(len(x), 3, x.shape[1])
        for part, (norm, projection) in enumerate(zip(self.norms, self.projections, strict=True)):
            qkv[:, part] = projection(norm(x))
        table = self.distance(sines).view(-1, *self.shape)
        out = distance_attention(qkv.view(-1, 3, *self.shape), table, self.biases, lengths)
        del qkv, table
        return self.out(out)


class FireRedLayer:
    """A layer of the conformer: half an MLP, attention, a convolution over time, half an MLP, a norm."""

    def __init__(self, s: FireRedEncoderSpec, build: Builder) -> None:
        names = ("net.0", "net.1", "net.4")
        self.first_mlp = ConformerMlp(ConformerMlpSpec(s.width, s.inner, names), build.scope("ffn1"))
        self.attention = FireRedAttention(s, build)
        convolution = ConvolutionSpec(s.width, 2 * s.width, s.taps, _NAMES, bias=False, layer_norm=True)
        self.convolution = ConformerConvolution(convolution, build.scope("conv"))
        self.second_mlp = ConformerMlp(ConformerMlpSpec(s.width, s.inner, names), build.scope("ffn2"))
        self.norm = build.norm("layer_norm", s.width, EPS, True)

    def __call__(self, x: Tensor, lengths: Sequence[int], sines: Tensor) -> Tensor:
        x = x.add(self.first_mlp(x), alpha=0.5)
        x += self.attention(x, lengths, sines)
        x += self.convolution(x, lengths)
        x.add_(self.second_mlp(x), alpha=0.5)
        return self.norm(x)


class FireRedEncoder(TensorModule):
    """Frames of items, concatenated, `[frames, mels]` -> `[rows, width]`."""

    def __init__(self, spec: FireRedEncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, build = spec, Builder(self, dtype, device)
        self.merge = FireRedMerger(spec, build.scope("input_preprocessor"))
        self.blocks = [FireRedLayer(spec, build.scope(f"layer_stack.{i}")) for i in range(spec.layers)]

    def forward(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        lengths = [num_rows(n) for n in frames]
        x = torch.cat([self.merge(item) for item in features.split(list(frames))])
        sines = distance_sines(self.spec.width, max(lengths), x)
        for layer in self.blocks:
            x = layer(x, lengths, sines)
        return x


def fire_red_encoder_bytes(c: FireRedEncoderSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in FireRedEncoder for `rows` rows in one call, inputs included."""
    longest = min(rows, num_rows(MOST_FRAMES))
    ops, s, w, x = OpBytes(dtype, limits), dtype.itemsize, c.width, rows * c.width * dtype.itemsize
    mlp = max(ops.norm(w, False) + ops.linear(w, c.inner, rows), ops.mlp(w, c.inner, c.inner, rows))
    base = 2 * x + (2 * longest - 1) * w * s  # the layer's input, the residual stream, the sines
    attention = distance_attention_bytes(w, c.heads, rows, longest, ops)  # a convolution needs less
    layers = base + max(rows * mlp, attention)
    inputs = rows * REDUCTION * c.mels * s
    merged = inputs + x + max(_merge_bytes(c, min(rows, _ROWS), ops), x)
    return SMALL + inputs + max(merged, x + distance_sines_bytes(w, longest, ops), layers)


def _merge_bytes(c: FireRedEncoderSpec, rows: int, ops: OpBytes) -> int:
    """Return the bytes alive in FireRedMerger while `rows` rows are computed, without the earlier rows."""
    s, early, late = ops.dtype.itemsize, (2 * rows + 1) * ((c.mels - 1) // 2), rows * c.merged
    first = early * (9 * s + ops.linear(9, _CHANNELS, early))
    second = late * (9 * _CHANNELS * s + ops.linear(9 * _CHANNELS, _CHANNELS, late))
    return max(first, early * ops.linear_result(_CHANNELS, early) + second)
