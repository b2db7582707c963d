"""Attention pooling of groups of patches: the mean of a group's patches attends to them (Molmo, arXiv 2409.17146)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...callers.errors import ConfigError
from ..memory_formulas import FLOAT32, OpBytes
from .basic import TensorModule
from .linear import Linear


@dataclass(frozen=True)
class PatchPoolingSpec:
    """`width`: numbers per patch; `heads` of `head_dim` numbers; `out`: numbers per result row.

    `kv_heads`: heads of keys and values; 0: as many as `heads`.
    """

    width: int
    heads: int
    head_dim: int
    out: int
    bias: bool = True
    kv_heads: int = 0

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys and values."""
        return self.heads // (self.kv_heads or self.heads)


class PatchPooling(TensorModule):
    """Patches `[patches, width]` and groups of them, int64 `[rows, n]` -> `[rows, out]`.

    A group lists numbers of patches; -1 stands for no patch. Rows without any patch are zeros.
    """

    def __init__(self, spec: PatchPoolingSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if spec.kv_heads and spec.heads % spec.kv_heads:
            raise ConfigError(
                f"{spec.heads} heads of the pooling layer are not a multiple of its {spec.kv_heads} heads of keys"
            )
        self.spec, inner = spec, spec.inner
        self.query = Linear(spec.width, {"q_proj": inner}, spec.bias, dtype, device)
        self.key_value = Linear(
            spec.width, {"k_proj": inner // spec.group, "v_proj": inner // spec.group}, spec.bias, dtype, device
        )
        self.out = Linear(inner, {"o_proj": spec.out}, spec.bias, dtype, device)

    def forward(self, patches: Tensor, groups: Tensor) -> Tensor:
        s, valid, index = self.spec, groups >= 0, groups.clamp(min=0)
        none = ~valid.any(1, keepdim=True)
        mean = _add_up(patches, index, valid.to(patches.dtype))
        mean.div_(valid.sum(1, keepdim=True).clamp_(min=1))
        q = self.query(mean).view(-1, s.heads, s.head_dim)
        del mean
        keys, values = self.key_value(patches).view(-1, 2, s.heads // s.group, s.head_dim).unbind(1)
        if s.group > 1:
            keys, values = (part.repeat_interleave(s.group, 1) for part in (keys, values))
        scores = torch.stack(
            [(q * keys.index_select(0, numbers)).sum(-1, dtype=torch.float32) for numbers in index.unbind(1)], 1
        )
        scores.mul_(s.head_dim**-0.5).masked_fill_(~(valid | none)[:, :, None], -torch.inf)
        weights = scores.softmax(1).to(patches.dtype)
        del q, scores
        pooled = _add_up(values, index, weights)
        return self.out(pooled.view(-1, s.inner)).masked_fill_(none, 0)


def _add_up(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rows of each group; weights `[groups, n, ...]`, one per row or per row and head."""
    total: Tensor | None = None
    for numbers, weight in zip(index.unbind(1), weights.unbind(1), strict=True):
        part = rows.index_select(0, numbers).mul_(weight[..., None])
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def patch_pooling_bytes(c: PatchPoolingSpec, patches: int, rows: int, group: int, ops: OpBytes) -> int:
    """Return the bytes alive in PatchPooling, its input and result included, for `rows` groups of `group` patches."""
    s = ops.dtype.itemsize
    index = rows * group * (8 + 8 + 1 + s)  # groups, their clamped copy, the mask, weights
    inputs = patches * c.width * s + index
    mean = rows * (2 * c.width * s + ops.linear(c.width, c.inner, rows))
    narrow = 2 * c.inner // c.group  # keys and values of a patch before they are repeated
    query, key_value = rows * c.inner * s, patches * (ops.linear_result(narrow, patches) + 2 * c.inner * s * (c.group > 1))
    projected = query + patches * ops.linear(c.width, narrow, patches)
    scored = query + key_value + rows * (2 * c.inner * s + 2 * group * c.heads * FLOAT32)
    pooled = key_value + rows * (2 * c.inner * s + group * c.heads * (FLOAT32 + s))
    last = key_value + rows * (c.inner * s + ops.linear(c.inner, c.out, rows))
    return inputs + max(mean, projected, scored, pooled, last)
