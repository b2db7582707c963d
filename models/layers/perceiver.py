"""The perceiver resampler: learned latents read any number of rows by cross-attention and become a fixed number of rows.

Source: arXiv 2405.02246 (Idefics2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..interface import StepLimits
from ..memory_formulas import OpBytes
from .basic import Norm, TensorModule
from .builder import StoredTensor
from .linear import Linear
from .mlp import GatedMlp, gated_mlp_bytes


@dataclass(frozen=True)
class PerceiverSpec:
    """`width`: numbers per input row, latent and result row. `kv_heads` may be fewer than `heads` (grouped-query attention)."""

    width: int
    latents: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    act: str = "silu"
    eps: float = 1e-6


class PerceiverAttention(TensorModule):
    """Attention of latents to all rows and to themselves."""

    def __init__(self, s: PerceiverSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.kv_heads, self.dim = s.kv_heads, s.head_dim
        keys = s.kv_heads * s.head_dim
        self.query = Linear(s.width, {"q_proj": s.heads * s.head_dim}, False, dtype, device)
        self.key_value = Linear(s.width, {"k_proj": keys, "v_proj": keys}, False, dtype, device)
        self.out = Linear(s.heads * s.head_dim, {"o_proj": s.width}, False, dtype, device)

    def forward(self, latents: Tensor, rows: Tensor) -> Tensor:
        """`[latents, width]` and `[rows, width]` -> `[latents, width]`."""
        kv = torch.cat((self.key_value(rows), self.key_value(latents)))
        k, v = kv.view(1, len(kv), 2, self.kv_heads, self.dim).permute(2, 0, 3, 1, 4)
        # query heads that share a key head become additional queries
        q = self.query(latents).view(len(latents), self.kv_heads, -1, self.dim).permute(1, 2, 0, 3)
        heads = F.scaled_dot_product_attention(q.reshape(1, self.kv_heads, -1, self.dim), k, v)
        return self.out(heads.view(q.shape).permute(2, 0, 1, 3).reshape(len(latents), -1))


class PerceiverLayer(TensorModule):
    """Attention and MLP, each after a norm."""

    def __init__(self, s: PerceiverSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        norm = partial(Norm, s.width, s.eps, False, dtype, device)
        self.input_latents_norm, self.input_context_norm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn = PerceiverAttention(s, dtype, device)
        self.mlp = GatedMlp(s.width, s.inner, False, dtype, device, act=s.act)

    def forward(self, latents: Tensor, rows: Tensor) -> Tensor:
        latents = latents + self.self_attn(self.input_latents_norm(latents), self.input_context_norm(rows))
        return latents + self.mlp(self.post_attention_layernorm(latents))


class PerceiverResampler(TensorModule):
    """`[rows, width]` of one image -> `[latents, width]`."""

    def __init__(self, spec: PerceiverSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.latents = StoredTensor((spec.latents, spec.width), dtype, device)
        self.layers = nn.ModuleList(PerceiverLayer(spec, dtype, device) for _ in range(spec.layers))
        self.norm = Norm(spec.width, spec.eps, False, dtype, device)

    def forward(self, rows: Tensor) -> Tensor:
        latents = self.latents.weight
        for layer in self.layers:
            latents = layer(latents, rows)
        return self.norm(latents)


def perceiver_bytes(s: PerceiverSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in PerceiverResampler for one image, its input rows included."""
    ops = OpBytes(dtype, replace(limits, rows=s.latents))
    row, keys = s.width * dtype.itemsize, 2 * s.kv_heads * s.head_dim
    project = row + ops.linear(s.width, keys, rows)
    attend = row + 2 * ops.linear_result(keys, rows) + ops.attention_copies(keys // 2)
    queries = 4 * s.heads * s.head_dim * dtype.itemsize + ops.linear(s.heads * s.head_dim, s.width, s.latents)
    mlp = gated_mlp_bytes(s.width, s.inner, ops)
    return rows * (row + max(ops.norm(s.width, True), project, attend)) + s.latents * (4 * row + max(queries, mlp))
