"""Factors of queries and values in the attention of Moondream 3: one per head, from the projected row and its position.

A factor is the hyperbolic tangent of a linear function of the activated row, plus a part that grows with the logarithm of the
position from 1 on. Source: vLLM's class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.activation import activation
from ..layers.basic import TensorModule
from ..layers.builder import StoredTensor
from ..layers.linear import Linear
from ..memory_formulas import FLOAT32, OpBytes
from .spec import AttentionSpec


class TauFactors(TensorModule):
    """The weights behind the factors of one layer."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = spec.heads, spec.kv_heads, spec.head_dim
        self.alpha = StoredTensor((spec.heads,), dtype, device)
        self.token = Linear(spec.projection_size, dict.fromkeys(("wq", "wv"), spec.heads), False, dtype, device)

    def scale_(self, projected: Tensor, positions: Tensor) -> None:
        """Scale queries and values in place. `projected`: `[rows, (heads + 2 * kv_heads) * dim]`. `positions`: int64."""
        of_token = activation("tanh", self.token(activation("gelu", projected))).view(-1, 2, self.heads)
        growth = torch.log1p(positions.float())[:, None] * self.alpha.weight.float()
        factors = of_token + (0.5 + activation("sigmoid", growth)).to(projected.dtype)[:, None]
        heads = projected.unflatten(1, (-1, self.dim))
        heads[:, : self.heads].mul_(factors[:, 0, :, None])
        heads[:, -self.kv_heads :].mul_(factors[:, 1, : self.kv_heads, None])


def tau_bytes(a: AttentionSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in `scale_`, without the projected row."""
    activated, factors = a.projection_size * ops.dtype.itemsize, 2 * a.heads * ops.dtype.itemsize
    return max(activated + ops.linear(a.projection_size, 2 * a.heads, ops.limits.rows), 3 * factors + 2 * a.heads * FLOAT32)
