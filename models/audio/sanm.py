"""The SAN-M encoder of SenseVoice: attention, to which a depthwise convolution over the values is added (the memory).

Stacked log-mel frames are the rows. The first layer has no residual connection, because it changes their width.

Sources: arXiv 2006.01713 (the memory), 2407.04051 (SenseVoice), and the classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import ConfigError
from ...checkpoints.config import check_activation, positive_int, positive_number
from ...kernels.varlen import varlen_attention
from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder
from ..layers.convolution import add_depthwise_
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from .conformer import ConformerMlp, ConformerMlpSpec
from .mel_encoder import sinusoids

_MLP_NAMES = ("post_attention_layernorm", "mlp.fc1", "mlp.fc2")
_DEFAULTS: Mapping[str, Any] = {
    "num_mel_bins": 80, "hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 2048, "num_hidden_layers": 70,
    "hidden_act": "relu", "num_stacked_frames": 7, "num_timestamp_prediction_layers": 20, "fsmn_kernel_size": 11,
    "layer_norm_eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True)
class SanmSpec:
    """`inputs`: numbers per stacked frame. `taps`: rows that the memory sees. `normed`: layers whose results are normed."""

    inputs: int
    width: int
    inner: int
    heads: int
    layers: int
    taps: int
    normed: frozenset[int]
    act: str
    eps: float


def sanm_spec(audio: Mapping[str, Any]) -> SanmSpec:
    """Read the raw `audio_config`.

    Raises:
        ConfigError: a value is not a positive integer, heads do not divide the width, inputs are odd, or no layer is left for
            transcription.
    """
    audio = {**_DEFAULTS, **audio}
    width, heads = positive_int(audio, "hidden_size"), positive_int(audio, "num_attention_heads")
    layers, last = positive_int(audio, "num_hidden_layers"), positive_int(audio, "num_timestamp_prediction_layers")
    inputs = positive_int(audio, "num_mel_bins") * positive_int(audio, "num_stacked_frames")
    if width % heads or inputs % 2 or inputs == width or last >= layers:
        raise ConfigError(
            f"audio_config must have a hidden_size ({width}) that is a multiple of num_attention_heads ({heads}), an even "
            f"number of bands in a stack ({inputs}) other than hidden_size, and more layers ({layers}) than "
            f"num_timestamp_prediction_layers ({last})"
        )
    return SanmSpec(
        inputs=inputs,
        width=width,
        inner=positive_int(audio, "intermediate_size"),
        heads=heads,
        layers=layers,
        taps=positive_int(audio, "fsmn_kernel_size"),
        normed=frozenset((layers - last - 1, layers - 1)),
        act=check_activation("hidden_act of audio_config", audio["hidden_act"]),
        eps=positive_number(audio, "layer_norm_eps"),
    )


class SanmAttention:
    """Attention of each row to its item, plus the memory: values and a convolution over them, zero-padded per item."""

    def __init__(self, s: SanmSpec, inputs: int, build: Builder) -> None:
        self.shape, self.before, w = (s.heads, s.width // s.heads), (s.taps - 1) // 2, s.width
        self.norm = build.norm("input_layernorm", inputs, s.eps, True)
        attention = build.scope("self_attn")
        self.qkv = attention.linear(["q_proj", "k_proj", "v_proj"], inputs, [w, w, w], True)
        self.kernel = attention.stored("fsmn.conv.weight", w, 1, s.taps)
        self.out = attention.linear(["o_proj"], w, [w], True)

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), 3, *self.shape).unbind(1)
        out = self.out(varlen_attention(q, k, v, lengths, self.shape[1] ** -0.5).flatten(1))
        del q, k
        values = v.flatten(1)
        del v
        out += values
        add_depthwise_(out, values, self.kernel.weight, lengths, self.before)
        return out


class SanmLayer:
    def __init__(self, s: SanmSpec, number: int, build: Builder) -> None:
        self.is_first = number == 0
        self.attention = SanmAttention(s, s.width if number else s.inputs, build)
        self.mlp = ConformerMlp(ConformerMlpSpec(s.width, s.inner, _MLP_NAMES, s.act, eps=s.eps), build)
        self.norms = [build.norm("final_layernorm", s.width, s.eps, True)] if number in s.normed else []

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run the layer, in place except for the first one and for norms."""
        attended = self.attention(x, lengths)
        x = attended if self.is_first else x.add_(attended)
        del attended
        x += self.mlp(x)
        for norm in self.norms:
            x = norm(x)
        return x


class SanmEncoder(TensorModule):
    """Stacked log-mel frames of items, concatenated, `[rows, inputs]` -> `[rows, width]`."""

    def __init__(self, spec: SanmSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, build = spec, dtype, Builder(self, dtype, device)
        self.blocks = [SanmLayer(spec, i, build.scope(f"layers.{i}")) for i in range(spec.layers)]

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        x: Tensor = features.to(self.dtype) * self.spec.width**0.5
        table = sinusoids(max(lengths) + 1, self.spec.inputs)[1:].to(x)  # positions count from 1
        for item in x.split(list(lengths)):
            item += table[: len(item)]
        del table, item
        for layer in self.blocks:
            x = layer(x, lengths)
        return x


def sanm_bytes(c: SanmSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in SanmEncoder for `rows` rows of one item, features included."""
    ops, s = OpBytes(dtype, limits), dtype.itemsize
    row, inputs = c.width * s, c.inputs * s
    positions = 5 * c.inputs // 2 * FLOAT32  # angles, sines and cosines, both together
    mlp = max(ops.norm(c.width, False) + ops.linear(c.width, c.inner, rows), ops.mlp(c.width, c.inner, c.inner, rows))
    first = max(inputs + _attention_bytes(c, c.inputs, rows, ops), inputs + row + mlp)
    other = row + max(_attention_bytes(c, c.width, rows, ops), mlp, ops.norm(c.width, False))
    tiles = 0 if ops.fused("varlen_attention") else ops.torch_attention_tiles(rows, c.width // c.heads)
    return SMALL + tiles + rows * (inputs + max(inputs + positions, first, other))


def _attention_bytes(c: SanmSpec, inputs: int, rows: int, ops: OpBytes) -> int:
    """Return the bytes per row in SanmAttention, without its input."""
    row, qkv = c.width * ops.dtype.itemsize, ops.linear_result(3 * c.width, rows)
    return max(
        ops.norm(inputs, False) + ops.linear(inputs, 3 * c.width, rows),
        qkv + row + ops.attention_copies(c.width),
        qkv + row + ops.linear(c.width, c.width, rows),
        qkv + 3 * row,  # results, values, and the values with zeros around them
    )
