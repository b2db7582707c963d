"""The Q-Former: a few queries look at one another and at the rows of a window, layer by layer. Knows no family.

Source: arXiv 2301.12597 (post-norm layers, one MLP for queries).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.activation import activation
from .tree import Maker


@dataclass(frozen=True)
class QFormerSpec:
    """`seen_width`: of the rows looked at; `every`: each so-manieth layer looks at them, the first among those."""

    width: int
    heads: int
    inner: int
    layers: int
    seen_width: int
    act: str = "gelu"
    eps: float = 1e-12
    every: int = 1


class Attention:
    """Queries look at rows, the result is added to them and normed."""

    def __init__(self, s: QFormerSpec, make: Maker, seen: int | None) -> None:
        """`seen`: width of the rows, None where queries look at one another."""
        self.heads, self.across = s.heads, seen is not None
        inner = make.below("attention")
        self.query = inner.linear(["query"], s.width, [s.width], True)
        self.key_value = inner.linear(["key", "value"], seen or s.width, [s.width, s.width], True)
        self.out = make.linear(["output.dense"], s.width, [s.width], True)
        self.norm = make.norm("output.LayerNorm", s.width, s.eps, True)

    def __call__(self, x: Tensor, count: int, seen: Tensor) -> Tensor:
        """`x` `[windows * queries, width]` in so many windows; `seen` `[windows * rows, ...]` -> as x."""
        rows = seen if self.across else x
        q = self.query(x).view(count, -1, self.heads, x.shape[1] // self.heads).transpose(1, 2)
        k, v = self.key_value(rows).view(count, -1, 2, self.heads, q.shape[3]).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.norm(self.out(out).add_(x))  # type: ignore[no-any-return]


class Layer:
    def __init__(self, s: QFormerSpec, make: Maker, looks: bool) -> None:
        self.act = s.act
        self.attention = [Attention(s, make.below("attention"), None)]
        if looks:
            self.attention.append(Attention(s, make.below("crossattention"), s.seen_width))
        self.first = make.linear(["intermediate_query.dense"], s.width, [s.inner], True)
        self.last = make.linear(["output_query.dense"], s.inner, [s.width], True)
        self.norm = make.norm("output_query.LayerNorm", s.width, s.eps, True)

    def __call__(self, x: Tensor, count: int, seen: Tensor) -> Tensor:
        for attention in self.attention:
            x = attention(x, count, seen)
        return self.norm(self.last(activation(self.act, self.first(x))).add_(x))  # type: ignore[no-any-return]


class QFormer(nn.Module):
    """`queries` `[windows, queries, width]` and `seen` `[windows, rows, seen_width]` -> `[windows, queries, width]`."""

    def __init__(self, spec: QFormerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        make = Maker(self, dtype, device)
        self.norms = [make.norm("layernorm", spec.width, spec.eps, True)]
        self.steps = [Layer(spec, make.below(f"encoder.layer.{i}"), i % spec.every == 0) for i in range(spec.layers)]

    def forward(self, queries: Tensor, seen: Tensor) -> Tensor:
        count, *_ = queries.shape
        rows = seen.reshape(-1, seen.shape[2])
        x = self.norms[0](queries.flatten(0, 1))
        for step in self.steps:
            x = step(x, count, rows)
        return x.view(queries.shape)  # type: ignore[no-any-return]
