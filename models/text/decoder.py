"""The decoder-only stack over a paged cache, each layer as its spec says. Knows no media and no checkpoint."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ...kernels.attention import paged_attention
from ...kernels.metadata import AttentionMetadata
from ...kernels.placing import place
from ...kernels.scatter import put_rows_
from ..interface import CacheSpec, ForwardBatch
from ..layers.basic import Embedding, Norm, Scale
from ..layers.linear import Linear
from ..layers.mla import LatentAttention
from ..layers.mlp import GatedMlp
from ..layers.moe import Mixture, MixtureByKind
from .rope import Rotary, Turns
from .spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec


class Attention(nn.Module):
    """Grouped-query attention. `normed` and `rope` are plain data: a layer that has neither asks for nothing more."""

    def __init__(self, spec: AttentionSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        self.parts, self.dim, self.scale, self.normed = (heads, kv_heads, kv_heads), dim, spec.scale, spec.qk_norm
        self.neighbours = spec.rope is not None and spec.rope.neighbours
        slices = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv = Linear(stack.hidden_size, slices, spec.bias, dtype, device)
        self.out = Linear(heads * dim, {"o_proj": stack.hidden_size}, spec.out_bias, dtype, device)
        self.cache_spec = CacheSpec("full" if spec.window is None else "window", kv_heads, dim, dtype, spec.window)
        self.attend = paged_attention if spec.soft_cap is None else partial(paged_attention, soft_cap=spec.soft_cap)
        if spec.qk_norm is not None:
            q, k = (dim, dim) if spec.qk_norm == "head" else (heads * dim, kv_heads * dim)
            norm = partial(Norm, eps=stack.eps, bias=False, dtype=dtype, device=device, offset=stack.norm_offset)
            self.q_norm, self.k_norm = norm(q), norm(k)

    def forward(self, x: Tensor, turns: Turns | None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)  # [rows, heads + 2 * kv_heads, dim]
        norms = None
        if self.normed == "all":  # the heads of a row as one
            for part, norm in zip(qkv.split(self.parts, 1), (self.q_norm, self.k_norm), strict=False):
                norm.heads_(part.flatten(1)[:, None])
        elif self.normed is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset
        q, k, v = place(qkv, cache, attn, turns, self.neighbours, norms)
        return self.out(self.attend(q, k, v, cache, attn, self.scale).flatten(1))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.self_attn = _attention(spec, stack, dtype, device)
        self.mlp = _mlp(spec, stack, dtype, device)
        norms = [
            Norm(stack.hidden_size, stack.eps, False, dtype, device, offset=stack.norm_offset, stored=name)
            for name in spec.norms
        ]
        self.before_attention, self.before_mlp = norms[0], norms[len(norms) // 2]
        if spec.sandwich or stack.residual_scale != 1.0:
            after: list[nn.Module] = [*norms[1::2]] if spec.sandwich else [Scale(stack.residual_scale)] * 2
            self.after_attention, self.after_mlp = after

    def forward(
        self, x: Tensor, add: Tensor | None, turns: Turns | None, cache: Tensor, attn: AttentionMetadata, kinds: Tensor | None
    ) -> Tensor:
        """Works on the residual stream `x` in place; what each part adds to it is added by the norm that comes next."""
        add = self.self_attn(self.before_attention(x, add), turns, cache, attn)
        return self.mlp(self.before_mlp(x, add), kinds)  # type: ignore[no-any-return]


class AdjustedLayer(Layer):
    """What attention and MLP make is normed once more, or scaled, before it is added."""

    def forward(
        self, x: Tensor, add: Tensor | None, turns: Turns | None, cache: Tensor, attn: AttentionMetadata, kinds: Tensor | None
    ) -> Tensor:
        add = self.after_attention(self.self_attn(self.before_attention(x, add), turns, cache, attn))
        return self.after_mlp(self.mlp(self.before_mlp(x, add), kinds))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token rows with encoder rows put in -> normed hidden states `[rows, hidden]`."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype, device, spec.embed_scale)
        plain = spec.residual_scale == 1.0 and not any(layer.sandwich for layer in spec.layers)
        layers = [(Layer if plain else AdjustedLayer)(layer, spec, dtype, device) for layer in spec.layers]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(spec.hidden_size, spec.eps, False, dtype, device, offset=spec.norm_offset)
        self.cache_specs = [layer.self_attn.cache_spec for layer in layers]
        self.rotaries = [Rotary(rope, device) for rope in spec.ropes]
        self.turns_of = [spec.ropes.index(a.rope) if a.rope is not None else -1 for a in spec.attentions]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        levels = self._put_in(x, batch)
        turns = [*(rotary(batch.positions) for rotary in self.rotaries), None]  # the last is for layers without positions
        add, kinds = None, batch.modality_ids
        steps = zip(self.layers, self.turns_of, batch.kv_caches, batch.attn, strict=True)
        for i, (layer, own, cache, attn) in enumerate(steps):
            add = layer(x, add, turns[own], cache, attn, kinds)
            if batch.embed_index is not None and i in levels:
                put_rows_(x.add_(add), batch.embed_index, levels[i], add=True)
                add = None
        return self.norm(x, add)  # type: ignore[no-any-return]

    def _put_in(self, x: Tensor, batch: ForwardBatch) -> dict[int, Tensor]:
        """Encoder rows take the place of rows of `x`; their further levels, each `[n, hidden]`, by the layers they follow."""
        if batch.embed_index is None or batch.embed_rows is None:
            return {}
        first, *levels = batch.embed_rows.split(x.shape[1], 1)
        put_rows_(x, batch.embed_index, first)
        return dict(zip(self.spec.deepstack, levels, strict=True))


def _attention(spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> Attention | LatentAttention:
    if isinstance(spec.attention, AttentionSpec):
        return Attention(spec.attention, stack, dtype, device)
    return LatentAttention(stack.hidden_size, spec.attention, dtype, device)


def _mlp(spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    m = spec.mlp
    if isinstance(m, MlpSpec):
        return GatedMlp(stack.hidden_size, m.inner, m.bias, dtype, device, act=m.act, fused=m.fused)
    made = Mixture if len(m.kinds) == 1 else MixtureByKind
    return made(stack.hidden_size, m, dtype, device)
