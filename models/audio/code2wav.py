"""Qwen3-Omni's code-to-wave model (arXiv 2509.17765): frames of codes become samples by causal layers.

The mean of a frame's embedded codes passes a transformer with a sliding window, then causal convolutions that raise the rate.
As no layer sees later frames, samples are computed part by part; each layer keeps the inputs that it needs again. The
published model begins anew every 300 frames, with the 25 frames before them, so that is done here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, positive_number, require
from ...kernels.activation import act_and_mul
from ..layers.basic import EmbeddingTable, TensorModule
from ..layers.builder import Builder
from ..layers.convolution import CausalConv1d, CausalUpsample1d, Past
from ..text.attention_config import fixed_rope
from ..text.rope import Rotary
from ..text.spec import RopeSpec
from .bigvgan import SnakeBeta

PART = 12  # frames that are computed at once; a divisor of _CHUNK
_CHUNK, _CONTEXT = 300, 25  # frames of a chunk, which the layers compute alone, and frames before it that they read, too
_DILATIONS = (1, 3, 9)
_ENDS = 7  # taps of the first and last convolution, and of most others


@dataclass(frozen=True)
class Code2WavSpec:
    """Sizes of the model.

    Args:
        codebooks, codes: codes per frame, and entries of each codebook.
        window: frames that a frame attends to, its own included.
        rates: of the convolutions before the decoder; strides: of those in it, whose width is halved each time.
    """

    codebooks: int
    codes: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    bias: bool
    window: int
    rope: RopeSpec
    eps: float
    rates: Sequence[int]
    strides: Sequence[int]
    channels: int

    @property
    def samples_per_frame(self) -> int:
        return prod(self.rates) * prod(self.strides)

    def peak_bytes(self) -> int:
        """Return the bytes alive while a part is computed: results of the widest stage and its temporaries."""
        rate = prod(self.rates)
        widest = max(rate * max(4 * self.width, self.channels), 4 * self.inner)
        for number, stride in enumerate(self.strides):
            rate *= stride
            widest = max(widest, rate * (self.channels >> number + 1))
        return 8 * (PART + _CONTEXT + self.window) * widest * 4

    @property
    def kept_bytes(self) -> int:
        """Bytes that live between two parts: the last one, keys and values of the window, and last inputs of convolutions."""
        keys = 2 * self.layers * (self.window - 1) * self.kv_heads * (self.width // self.heads)
        ends = self.width * (1 + len(self.rates)) + (self.channels >> len(self.strides))
        stages = range(len(self.strides))
        units = sum((self.channels >> i + 1) for i in stages) * sum(_DILATIONS)
        raised = sum(self.channels >> i for i in stages)
        return (keys + (_ENDS - 1) * (ends + units) + raised + (PART + _CONTEXT) * self.samples_per_frame) * 4


def code2wav_spec(config: Mapping[str, Any]) -> Code2WavSpec:
    """Read `code2wav_config`. Raise ConfigError for a rope type that reads the length, and sizes that do not fit together."""
    rates, strides = (list(require(config, name)) for name in ("upsampling_ratios", "upsample_rates"))
    width, heads, channels = (positive_int(config, name) for name in ("hidden_size", "num_attention_heads", "decoder_dim"))
    kv_heads = positive_int(config, "num_key_value_heads")
    if width % (2 * heads) or heads % kv_heads or channels % 2 ** len(strides):
        raise ConfigError(
            "hidden_size, heads, decoder_dim and upsample_rates of code2wav_config in config.json do not fit together"
        )
    return Code2WavSpec(
        positive_int(config, "num_quantizers"),
        positive_int(config, "codebook_size"),
        width,
        positive_int(config, "intermediate_size"),
        positive_int(config, "num_hidden_layers"),
        heads,
        kv_heads,
        bool(config.get("attention_bias")),
        positive_int(config, "sliding_window"),
        fixed_rope(config, "code2wav_config", width // heads),
        positive_number(config, "rms_norm_eps"),
        rates,
        strides,
        channels,
    )


class _CodeLayer:
    """Attention within a window and a gated MLP, whose outputs are scaled channel by channel."""

    def __init__(self, spec: Code2WavSpec, build: Builder) -> None:
        self.spec, self.dim = spec, spec.width // spec.heads
        widths = [spec.heads * self.dim, *[spec.kv_heads * self.dim] * 2]
        self.norms = [build.norm(name, spec.width, spec.eps, False) for name in ("input_layernorm", "post_attention_layernorm")]
        self.scales = [build.stored(f"{name}_layer_scale.scale", spec.width) for name in ("self_attn", "mlp")]
        self.qkv = build.linear([f"self_attn.{name}_proj" for name in "qkv"], spec.width, widths, spec.bias)
        self.out = build.linear(["self_attn.o_proj"], widths[0], [spec.width], spec.bias)
        self.gate_up = build.linear(["mlp.gate_proj", "mlp.up_proj"], spec.width, [spec.inner] * 2, False)
        self.down = build.linear(["mlp.down_proj"], spec.inner, [spec.width], False)

    def __call__(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], past: Past) -> Tensor:
        x = x + self.scales[0].weight * self.out(self._attend(self.norms[0](x), cos_sin, past))
        return x + self.scales[1].weight * self.down(act_and_mul("silu", self.gate_up(self.norms[1](x))))

    def _attend(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], past: Past) -> Tensor:
        """Attend over `x [frames, width]` and the frames before that are inside the window."""
        spec = self.spec
        q, k, v = self.qkv(x).view(len(x), -1, self.dim).transpose(0, 1).split((spec.heads, spec.kv_heads, spec.kv_heads))
        keys = past.append(self, torch.cat((_rotated(k, *cos_sin), v), 2), 1, spec.window - 1)
        positions = torch.arange(keys.shape[1], device=x.device)
        back = positions[-len(x) :, None] - positions
        visible = (back >= 0) & (back < spec.window)
        k, v = keys.repeat_interleave(spec.heads // spec.kv_heads, 0).split(self.dim, 2)
        attended = F.scaled_dot_product_attention(_rotated(q, *cos_sin)[None], k[None], v[None], visible)
        return attended[0].transpose(0, 1).flatten(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _Transformer(TensorModule):
    def __init__(self, spec: Code2WavSpec, device: torch.device) -> None:
        super().__init__()
        build = Builder(self, torch.float32, device)
        self.blocks = [_CodeLayer(spec, build.scope(f"layers.{i}")) for i in range(spec.layers)]
        self.last_norm = (build.norm("norm", spec.width, spec.eps, False),)
        self.rotary = Rotary(spec.rope, device)

    def forward(self, x: Tensor, start: int, past: Past) -> Tensor:
        """Run frames `[n, width]`, the first of which has the position `start`."""
        cos, sin, *_ = self.rotary(torch.arange(start, start + len(x), device=x.device)[None])
        for block in self.blocks:
            x = block(x, (cos, sin), past)
        return self.last_norm[0](x)


class _ConvNext(TensorModule):
    """A depthwise convolution and an MLP over channels, with a residual. `[1, width, time] -> [1, width, time]`."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        build = Builder(self, torch.float32, device)
        self.dwconv = CausalConv1d(width, width, _ENDS, device, groups=width)
        self.layers = build.linear(["pwconv1"], width, [4 * width], True), build.linear(["pwconv2"], 4 * width, [width], True)
        self.normed, self.factor = (build.norm("norm", width, 1e-6, True),), (build.stored("gamma", width),)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        rows = self.normed[0](self.dwconv(x, past)[0].T.contiguous())
        rows = self.layers[1](F.gelu(self.layers[0](rows)))
        return x + (self.factor[0].weight * rows).T[None]


class _Unit(TensorModule):
    """Two convolutions, the first dilated, each after an activation, with a residual."""

    def __init__(self, channels: int, dilation: int, device: torch.device) -> None:
        super().__init__()
        self.act1, self.act2 = SnakeBeta(channels, device), SnakeBeta(channels, device)
        self.conv1 = CausalConv1d(channels, channels, _ENDS, device, dilation=dilation)
        self.conv2 = CausalConv1d(channels, channels, 1, device)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), past)), past)


class _Stage(TensorModule):
    """Halves the channels and multiplies the rate. `[1, channels, time] -> [1, channels / 2, stride * time]`."""

    def __init__(self, channels: int, stride: int, device: torch.device) -> None:
        super().__init__()
        half = channels // 2
        self.into = SnakeBeta(channels, device), CausalUpsample1d(channels, half, 2 * stride, stride, device)
        self.units = [_Unit(half, dilation, device) for dilation in _DILATIONS]
        self.block = nn.ModuleList([*self.into, *self.units])

    def forward(self, x: Tensor, past: Past) -> Tensor:
        act, up = self.into
        x = up(act(x), past)
        for unit in self.units:
            x = unit(x, past)
        return x


class Code2Wav(nn.Module):
    """Frames of codes -> samples in [-1, 1], in float32."""

    def __init__(self, spec: Code2WavSpec, device: torch.device) -> None:
        super().__init__()
        self.spec, width, channels = spec, spec.width, spec.channels
        self.code_embedding = EmbeddingTable(spec.codes * spec.codebooks, width, torch.float32, device)
        self.pre_transformer = _Transformer(spec, device)
        self.raised = [(CausalUpsample1d(width, width, rate, rate, device), _ConvNext(width, device)) for rate in spec.rates]
        self.upsample = nn.ModuleList(nn.ModuleList(pair) for pair in self.raised)
        self.stages: list[CausalConv1d | _Stage] = [CausalConv1d(width, channels, _ENDS, device)]
        self.stages += [_Stage(channels >> number, stride, device) for number, stride in enumerate(spec.strides)]
        channels >>= len(spec.strides)
        self.last = SnakeBeta(channels, device), CausalConv1d(channels, 1, _ENDS, device)
        self.decoder = nn.ModuleList([*self.stages, *self.last])

    def parts(self, frames: Iterable[Sequence[int]]) -> Iterator[Tensor]:
        """Yield the samples of every PART frames, float32 `[n]`, as soon as `frames` has decoded these.

        A frame gives `samples_per_frame` samples. Of the last frame before the layers begin anew, and of the very last one,
        the final samples are missing, since these depend on a later frame.
        """
        frames, recent, past, start = iter(frames), list[Sequence[int]](), Past(), 0
        surplus = 0  # samples of frames that were heard already
        while part := list(islice(frames, PART)):
            if start % _CHUNK == 0:
                past, surplus, decoded, first = Past(), len(recent) * self.spec.samples_per_frame, recent + part, 0
            else:
                decoded = part
            wave = self._synthesize(decoded, first, past)
            yield wave[surplus:]
            surplus, first, start = max(0, surplus - len(wave)), first + len(decoded), start + len(part)
            recent = (recent + part)[-_CONTEXT:]

    def _synthesize(self, frames: Sequence[Sequence[int]], first: int, past: Past) -> Tensor:
        codes = torch.tensor(frames, device=self.code_embedding.weight.device)
        codes = codes + torch.arange(self.spec.codebooks, device=codes.device) * self.spec.codes
        embedded = self.code_embedding(codes.flatten()).view(*codes.shape, -1).mean(1)
        x = self.pre_transformer(embedded, first, past).T[None]
        for up, block in self.raised:
            x = block(up(x, past), past)
        for stage in self.stages:
            x = stage(x, past)
        act, last = self.last
        return last(act(x), past).clamp(-1, 1).flatten()
