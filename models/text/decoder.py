"""The decoder-only stack over a paged cache: rotary grouped-query attention, SwiGLU, RMSNorm. Knows no media."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.activation import silu_mul
from ...kernels.attention import paged_attention
from ...kernels.metadata import AttentionMetadata
from ...kernels.rope import rotary_cos_sin, rotate_
from ..config import TextConfig
from ..interface import CacheSpec, ForwardBatch
from ..layers.basic import Embedding, Norm
from ..layers.linear import Linear


class Attention(nn.Module):
    def __init__(self, c: TextConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.heads, c.kv_heads, c.head_dim
        slices = {"q_proj": c.heads * c.head_dim, "k_proj": c.kv_heads * c.head_dim, "v_proj": c.kv_heads * c.head_dim}
        self.qkv = Linear(c.hidden_size, slices, True, dtype, device)
        self.out = Linear(c.heads * c.head_dim, {"o_proj": c.hidden_size}, False, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)  # [rows, heads + 2 * kv_heads, dim]
        rotate_(qkv[:, : self.heads + self.kv_heads], cos, sin)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        return self.out(paged_attention(q, k, v, cache, attn, self.dim**-0.5).flatten(1))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, inner: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_up = Linear(dim, {"gate_proj": inner, "up_proj": inner}, bias, dtype, device)
        self.down = Linear(inner, {"down_proj": dim}, bias, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, c: TextConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.eps, False, dtype, device)
        self.post_attention_layernorm = Norm(c.hidden_size, c.eps, False, dtype, device)
        self.self_attn = Attention(c, dtype, device)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, False, dtype, device)

    def forward(
        self, x: Tensor, add: Tensor | None, cos: Tensor, sin: Tensor, cache: Tensor, attn: AttentionMetadata
    ) -> Tensor:
        """Works on the residual stream `x` in place; what each part adds to it is added by the norm that comes next."""
        add = self.self_attn(self.input_layernorm(x, add), cos, sin, cache, attn)
        return self.mlp(self.post_attention_layernorm(x, add))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token rows with encoder rows put in -> normed hidden states `[rows, hidden]`."""

    def __init__(self, c: TextConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = c
        self.cache_specs = [CacheSpec("full", c.kv_heads, c.head_dim, dtype)] * c.layers
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype, device)
        self.layers = nn.ModuleList(Layer(c, dtype, device) for _ in range(c.layers))
        self.norm = Norm(c.hidden_size, c.eps, False, dtype, device)
        dim = c.head_dim
        self.inv_freq = (c.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)).to(device)
        axes = torch.arange(len(c.rope_sections))
        self.axis_of_freq = axes.repeat_interleave(torch.tensor(c.rope_sections)).to(device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        if batch.embed_index is not None and batch.embed_rows is not None:
            x.index_copy_(0, batch.embed_index, batch.embed_rows.to(x.dtype))
        cos, sin = rotary_cos_sin(batch.positions, self.inv_freq, self.axis_of_freq)
        add = None
        for layer, cache, attn in zip(self.layers, batch.kv_caches, batch.attn, strict=True):
            add = layer(x, add, cos, sin, cache, attn)
        return self.norm(x, add)  # type: ignore[no-any-return]
