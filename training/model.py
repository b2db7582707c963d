"""Qwen2.5-VL for training on batches of images of one size. Weight names are those of the checkpoint.

Every image of a batch has the same grid, so attention is a plain batched product that supports autograd; inference in the
package is paged and packed. `evaluate.py` checks that both compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "mrope_section": [4, 6, 6],
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_heads": 4,
    "out_hidden_size": 128,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 64,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
    "in_channels": 3,
}


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embeddings to `x [..., heads, tokens, dim]` by `angles [..., tokens, dim/2]`, halves rotated."""
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, inner, bias=bias), nn.Linear(dim, inner, bias=bias)
        self.down_proj = nn.Linear(inner, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)  # [b, heads, n, hd]
        q, k = rotate(q, angles), rotate(k, angles)
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, n, d))


class VisionBlock(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d = c["hidden_size"]
        self.norm1, self.norm2 = nn.RMSNorm(d, 1e-6), nn.RMSNorm(d, 1e-6)
        self.attn, self.mlp = VisionAttention(d, c["num_heads"]), Mlp(d, c["intermediate_size"], bias=True)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), angles, mask)
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    """Patches `[b, n, patch_dim]` in merge order -> `[b, n / merge^2, out]`. `n` patches of one frame pair."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, m = c["hidden_size"], c["spatial_merge_size"] ** 2
        self.config = c
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Linear(3 * c["temporal_patch_size"] * c["patch_size"] ** 2, d, bias=False)}
        )
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c["depth"]))
        self.merger = nn.ModuleDict(
            {
                "ln_q": nn.RMSNorm(d, 1e-6),
                "mlp": nn.Sequential(nn.Linear(d * m, d * m), nn.GELU(), nn.Linear(d * m, c["out_hidden_size"])),
            }
        )

    def forward(self, patches: Tensor, h: int, w: int) -> Tensor:
        """`h, w`: patches high and wide, both multiples of the merge size."""
        c = self.config
        rows, cols = merge_order(torch.arange(h)[:, None].expand(h, w)), merge_order(torch.arange(w)[None].expand(h, w))
        dim = c["hidden_size"] // c["num_heads"]
        freq = 10000.0 ** (-torch.arange(0, dim // 2, 2) / (dim // 2))
        angles = torch.cat((rows[:, None] * freq, cols[:, None] * freq), -1)  # [n, dim/2]
        side = c["window_size"] // c["patch_size"]
        window = (rows // side) * 1000 + cols // side
        same = window[:, None] == window[None]
        x = self.patch_embed["proj"](patches)
        for i, block in enumerate(self.blocks):
            x = block(x, angles, None if i in c["fullatt_block_indexes"] or bool(same.all()) else same)
        b, n, d = x.shape
        return self.merger["mlp"](self.merger["ln_q"](x).view(b, n // 4, 4 * d))


def merge_order(grid: Tensor) -> Tensor:
    """`[h, w, ...]` patches to `[h * w, ...]`, the four of each 2x2 square next to each other."""
    h, w, *rest = grid.shape
    return grid.reshape(h // 2, 2, w // 2, 2, *rest).transpose(1, 2).reshape(h * w, *rest)


class TextAttention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, self.heads, self.kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = d // self.heads
        self.q_proj = nn.Linear(d, d)
        self.k_proj, self.v_proj = nn.Linear(d, self.kv_heads * self.dim), nn.Linear(d, self.kv_heads * self.dim)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        b, n, d = x.shape
        q = rotate(self.q_proj(x).view(b, n, self.heads, self.dim).transpose(1, 2), angles)
        k = rotate(self.k_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2), angles)
        v = self.v_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))


class TextLayer(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d = c["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(d, 1e-6), nn.RMSNorm(d, 1e-6)
        self.self_attn, self.mlp = TextAttention(c), Mlp(d, c["intermediate_size"], bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyVL(nn.Module):
    """Tower and tied decoder. `forward` returns logits `[b, tokens, vocab]` and the tower's rows."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        c = TEXT
        self.visual = Tower(VISION)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(vocab, c["hidden_size"]),
                "layers": nn.ModuleList(TextLayer(c) for _ in range(c["num_hidden_layers"])),
                "norm": nn.RMSNorm(c["hidden_size"], 1e-6),
            }
        )
        dim = c["hidden_size"] // c["num_attention_heads"]
        self.freq = c["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        self.axis = torch.repeat_interleave(torch.arange(3), torch.tensor(c["mrope_section"]))  # axis of each frequency
        for name, p in self.named_parameters():
            if name.endswith("weight") and p.dim() == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else 0.7 * p.shape[1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor, start: int, patches: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """`ids [b, tokens]` with image pads at `start`; `patches [b, t, h * w, dim]`; `grid (t, h, w)` in patches."""
        b, t, n, _ = patches.shape
        rows = self.visual(patches.flatten(0, 1), grid[1], grid[2]).view(b, t * n // 4, -1)
        x = self.model["embed_tokens"](ids)
        x = torch.cat((x[:, :start], rows.to(x.dtype), x[:, start + rows.shape[1] :]), 1)
        positions = mrope(ids.shape[1], start, grid)  # [3, tokens]
        angles = positions[self.axis].T * self.freq
        for layer in self.model["layers"]:
            x = layer(x, angles)
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight), rows


def mrope(length: int, start: int, grid: tuple[int, int, int], step: int = 2) -> Tensor:
    """Positions `[3, length]` of one item at `start`; a frame pair (1 s) is `step` positions long."""
    t, h, w = grid[0], grid[1] // 2, grid[2] // 2
    item = (
        torch.stack(torch.meshgrid(torch.arange(t) * step, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1) + start
    )
    after = int(item.max()) + 1 + torch.arange(length - start - t * h * w)
    return torch.cat((torch.arange(start).expand(3, -1), item, after.expand(3, -1)), 1).float()
