"""Kimi delta attention: linear attention with a gated delta rule in which each channel of a key has a decay of its own.

Source: arXiv 2510.26692.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.activation import activation
from ...kernels.metadata import AttentionMetadata
from ...kernels.norm import rms_norm
from ...kernels.state import linear_recurrence
from ..interface import CacheSpec
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from ..text.spec import KdaSpec
from .basic import Converter, Convertible, Norm, TensorModule
from .builder import StoredTensor
from .linear import Linear
from .recurrent import CausalConv, unit_length


class KimiDeltaAttention(TensorModule, Convertible):
    """A head's state is a matrix `[head_dim, head_dim]`.

    Decays and the gate of the result come from low-rank projections. Those of the decays and of the learning rate beta are
    never quantised.
    """

    def __init__(self, hidden: int, spec: KdaSpec, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, width, dim = spec, spec.heads * spec.head_dim, spec.head_dim
        self.project = Linear(hidden, {f"{name}_proj": width for name in "qkv"}, False, dtype, device)
        self.sizes = (dim, dim, spec.heads)
        names = ("f_a_proj", "g_a_proj", "b_proj")
        self.low = Linear(hidden, dict(zip(names, self.sizes, strict=True)), False, dtype, device, exact=True)
        self.forget = Linear(dim, {"f_b_proj": width}, False, dtype, device, exact=True)
        self.gate = Linear(dim, {"g_b_proj": width}, False, dtype, device)
        parts = {f"{name}_conv1d": width for name in "qkv"}
        self.conv1d = CausalConv(3 * width, spec.taps, False, dtype, device, parts)
        self.A_log = StoredTensor((spec.heads,), torch.float32, device)
        self.dt_bias = StoredTensor((width,), torch.float32, device)
        self.norm = Norm(dim, eps, False, dtype, device, stored="o_norm")
        self.out = Linear(width, {"o_proj": hidden}, False, dtype, device)
        self.cache_spec = CacheSpec("state", 1, self.conv1d.state_size + width * dim, dtype)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield the converter of `A_log`, which is stored as `[1, 1, heads, 1]`."""
        yield f"{path}.A_log", lambda stored: [(f"{path}.A_log", stored.flatten())]

    def forward(self, x: Tensor, cos_sin: None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        s, rows, conv_size = self.spec, len(x), self.conv1d.state_size
        q, k, v = self._queries_keys_values(x, cache[:, :conv_size], attn)
        forget, gate, beta = self.low(x).split(self.sizes, 1)
        beta, decay = activation("sigmoid", beta.contiguous()).float(), self._decays(forget.contiguous())
        out = linear_recurrence(q, k, v, decay, beta, cache[:, conv_size:], attn).to(x.dtype)
        del q, k, v, decay
        out = rms_norm(out.view(-1, s.head_dim), self.norm.weight, self.norm.eps).view(rows, -1)
        return self.out((out * activation("sigmoid", self.gate(gate.contiguous()).float())).to(x.dtype))

    def _queries_keys_values(self, x: Tensor, states: Tensor, attn: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
        """Return float32 `[rows, heads, head_dim]` each; queries are scaled."""
        s = self.spec
        mixed = activation(s.act, self.conv1d(self.project(x), states, attn)).float()
        q, k, v = mixed.view(len(x), 3, s.heads, s.head_dim).unbind(1)
        return unit_length(q).mul_(s.head_dim**-0.5), unit_length(k), v

    def _decays(self, forget: Tensor) -> Tensor:
        """Return the decays of each channel of a key, float32 `[rows, heads, head_dim]`."""
        steps = activation("softplus", self.forget(forget).float() + self.dt_bias.weight)
        steps = steps.view(len(forget), self.spec.heads, self.spec.head_dim)
        return steps.mul_(-self.A_log.weight.exp()[:, None]).exp_()


def kda_bytes(width: int, spec: KdaSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in KimiDeltaAttention, without its input."""
    s, rows, small, inner = ops.dtype.itemsize, ops.limits.rows, -(-SMALL // ops.limits.rows), spec.heads * spec.head_dim
    low = ops.linear_result(2 * spec.head_dim + spec.heads, rows)
    # in float32: convolved channels, queries, keys, a copy of the values, decays, results
    recurrence = low + (8 * inner + spec.heads) * FLOAT32
    if ops.limits.device.type == "cpu" or not ops.fused("linear_recurrence"):  # in torch: a state and two copies
        recurrence += -(-3 * inner * spec.head_dim * FLOAT32 // rows)
    gated = low + 3 * inner * FLOAT32 + max(2 * inner * s, ops.linear(inner, width, rows))
    return small + max(ops.linear(width, 3 * inner, rows) + 3 * inner * s, recurrence, gated)
