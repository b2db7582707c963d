"""The Q-Former: a few learned queries attend to one another and, by cross-attention, to the rows of a window.

Source: arXiv 2301.12597 (post-norm layers, one MLP for queries).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...checkpoints.config import check_activation, positive_int
from ...kernels.activation import activation
from ..interface import StepLimits
from ..memory_formulas import OpBytes
from .basic import TensorModule
from .builder import Builder


@dataclass(frozen=True)
class QFormerSpec:
    """`encoder_width`: numbers per row that queries attend to.

    `cross_frequency`: the first layer and every `cross_frequency`-th after it have cross-attention.
    """

    width: int
    heads: int
    inner: int
    layers: int
    encoder_width: int
    act: str = "gelu"
    eps: float = 1e-12
    cross_frequency: int = 1


def qformer_spec(q: Mapping[str, Any]) -> QFormerSpec:
    """Read a section of config.json; ConfigError for missing or unreadable values."""
    return QFormerSpec(
        width=positive_int(q, "hidden_size"),
        heads=positive_int(q, "num_attention_heads"),
        inner=positive_int(q, "intermediate_size"),
        layers=positive_int(q, "num_hidden_layers"),
        encoder_width=positive_int(q, "encoder_hidden_size"),
        act=check_activation("hidden_act of the Q-Former", q.get("hidden_act", "gelu")),
        eps=q.get("layer_norm_eps", 1e-12),
        cross_frequency=positive_int(q, "cross_attention_frequency"),
    )


class QFormerAttention:
    """Attention of queries, with the residual and the norm after it."""

    def __init__(self, s: QFormerSpec, build: Builder, encoder_width: int | None) -> None:
        """Build the layers. `encoder_width`: numbers per row that is attended to; None: self-attention of the queries."""
        self.heads, self.is_cross = s.heads, encoder_width is not None
        inner = build.scope("attention")
        self.query = inner.linear(["query"], s.width, [s.width], True)
        self.key_value = inner.linear(["key", "value"], encoder_width or s.width, [s.width, s.width], True)
        self.out = build.linear(["output.dense"], s.width, [s.width], True)
        self.norm = build.norm("output.LayerNorm", s.width, s.eps, True)

    def __call__(self, x: Tensor, windows: int, encoder_rows: Tensor) -> Tensor:
        """Attend: `x` `[windows * queries, width]`, `encoder_rows` `[windows * rows, ...]` -> like x."""
        rows = encoder_rows if self.is_cross else x
        q = self.query(x).view(windows, -1, self.heads, x.shape[1] // self.heads).transpose(1, 2)
        k, v = self.key_value(rows).view(windows, -1, 2, self.heads, q.shape[3]).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.norm(self.out(out).add_(x))


class QFormerLayer:
    def __init__(self, s: QFormerSpec, build: Builder, has_cross_attention: bool) -> None:
        self.act = s.act
        self.attention = [QFormerAttention(s, build.scope("attention"), None)]
        if has_cross_attention:
            self.attention.append(QFormerAttention(s, build.scope("crossattention"), s.encoder_width))
        self.first = build.linear(["intermediate_query.dense"], s.width, [s.inner], True)
        self.last = build.linear(["output_query.dense"], s.inner, [s.width], True)
        self.norm = build.norm("output_query.LayerNorm", s.width, s.eps, True)

    def __call__(self, x: Tensor, windows: int, encoder_rows: Tensor) -> Tensor:
        for attention in self.attention:
            x = attention(x, windows, encoder_rows)
        return self.norm(self.last(activation(self.act, self.first(x))).add_(x))


class QFormer(TensorModule):
    """Queries `[windows, queries, width]` and rows `[windows, rows, encoder_width]` -> `[windows, queries, width]`."""

    def __init__(self, spec: QFormerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        build, frequency = Builder(self, dtype, device), spec.cross_frequency
        self.norms = [build.norm("layernorm", spec.width, spec.eps, True)]  # in a list: registered by its checkpoint name only
        self.layers = [QFormerLayer(spec, build.scope(f"encoder.layer.{i}"), i % frequency == 0) for i in range(spec.layers)]

    def forward(self, queries: Tensor, encoder_rows: Tensor) -> Tensor:
        windows = len(queries)
        rows = encoder_rows.reshape(-1, encoder_rows.shape[2])
        x = self.norms[0](queries.flatten(0, 1))
        for layer in self.layers:
            x = layer(x, windows, rows)
        return x.view(queries.shape)


def qformer_bytes(s: QFormerSpec, queries: int, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in QFormer for one window of `rows` rows, which are not counted."""
    ops, row = OpBytes(dtype, replace(limits, rows=queries)), s.width * dtype.itemsize
    project = ops.linear(s.encoder_width, 2 * s.width, rows)
    attend = ops.linear_result(2 * s.width, rows) + ops.attention_copies(s.width)
    attention = rows * max(project, attend) + queries * 4 * row + ops.torch_attention_tiles(queries, s.width // s.heads, rows)
    return queries * 2 * row + max(attention, queries * (row + ops.mlp(s.width, s.inner, s.inner, queries)))
