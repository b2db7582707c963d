"""Multi-head latent attention (arXiv 2405.04434): one short row a token is cached, and queries come to meet it. Knows no stack.

Keys and values of a head are products of its two matrices with the cached row. Instead of making them for every token, the
first matrix is applied to the queries and the second to what attention makes: the cached rows themselves are keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...kernels.attention import paged_attention
from ...kernels.linear import Weights, linear, pack
from ...kernels.metadata import AttentionMetadata
from ...kernels.rope import rotate_
from ..interface import CacheSpec
from ..text.spec import LatentSpec
from .basic import Norm, Weighted
from .linear import Linear


class Unsqueeze(Weighted):
    """Of each head the matrices that make keys `[nope, latent]` and values `[value, latent]` of a latent row."""

    def __init__(self, spec: LatentSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.sizes = (spec.heads, spec.nope_dim + spec.value_dim, spec.latent)
        self.split = (spec.nope_dim, spec.value_dim)
        self.weight: Tensor | None = torch.empty(self.sizes[0] * self.sizes[1], spec.latent, dtype=dtype, device=device)
        self.keys: list[Weights] = []
        self.values: list[Weights] = []

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        assert self.weight is not None, "weights are packed already"
        yield f"{path[: path.rfind('.') + 1]}kv_b_proj.weight", self.weight

    def pack(self) -> None:
        assert self.weight is not None, "weights are packed already"
        for head in self.weight.view(self.sizes):
            key, value = head.split(self.split)
            self.keys.append(pack(key.T.contiguous(), None))
            self.values.append(pack(value.contiguous(), None))
        self.weight = None

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Inputs and outputs of each matrix that is laid out."""
        heads, _, latent = self.sizes
        nope, value = self.split
        for _ in range(heads):
            yield from ((nope, latent), (latent, value))

    def meet(self, q: Tensor) -> Tensor:
        """Queries `[rows, heads, nope]` -> `[rows, heads, latent]`."""
        return _by_head(q, self.keys)

    def forward(self, made: Tensor) -> Tensor:
        """Mixed latent rows `[rows, heads, latent]` -> `[rows, heads, value]`."""
        return _by_head(made, self.values)


def _by_head(x: Tensor, weights: list[Weights]) -> Tensor:
    return torch.stack([linear(own, weight) for own, weight in zip(x.unbind(1), weights, strict=True)], 1)


class LatentAttention(nn.Module):
    def __init__(self, hidden: int, spec: LatentSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, cached = spec, spec.latent + spec.rope.dim
        width = spec.query_latent
        slices = {"q_a_proj": width} if width is not None else {}
        self.squeeze = Linear(hidden, {**slices, "kv_a_proj_with_mqa": cached}, spec.bias, dtype, device)
        name, queries = "q_proj" if width is None else "q_b_proj", spec.heads * (spec.nope_dim + spec.rope.dim)
        self.query = Linear(width or hidden, {name: queries}, False, dtype, device)
        self.q_a_layernorm = None if width is None else Norm(width, spec.eps, False, dtype, device)
        self.kv_a_layernorm = Norm(spec.latent, spec.eps, False, dtype, device)
        self.unsqueeze = Unsqueeze(spec, dtype, device)
        self.out = Linear(spec.heads * spec.value_dim, {"o_proj": hidden}, spec.bias, dtype, device)
        self.cache_spec = CacheSpec("latent", 1, cached, dtype)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], cache: Tensor, attn: AttentionMetadata) -> Tensor:
        c, squeezed = self.spec, self.squeeze(x)
        asked = x if self.q_a_layernorm is None else self.q_a_layernorm(squeezed[:, : c.query_latent].contiguous())
        q = self.query(asked).view(len(x), c.heads, -1)  # [rows, heads, nope + rope]
        plain, turned = squeezed[:, c.query_latent or 0 :].split((c.latent, c.rope.dim), 1)
        row = torch.cat((self.kv_a_layernorm(plain.contiguous()), turned), 1)[:, None]
        rotate_(q[..., c.nope_dim :], *turns, c.rope.neighbours)
        rotate_(row[..., c.latent :], *turns, c.rope.neighbours)
        q = torch.cat((self.unsqueeze.meet(q[..., : c.nope_dim]), q[..., c.nope_dim :]), -1)
        made = paged_attention(q, row, None, cache, attn, c.scale)[..., : c.latent]
        return self.out(self.unsqueeze(made).flatten(1))  # type: ignore[no-any-return]
