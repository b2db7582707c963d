"""The gated MLP of decoders and of some towers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.activation import act_and_mul
from ...kernels.dispatch import fused
from ..interface import StepLimits
from ..memory_formulas import linear_bytes, linear_result
from .basic import TensorModule
from .linear import Linear


class GatedMlp(TensorModule):
    """`down(act(gate(x)) * up(x))`, `[rows, dim] -> [rows, out]`, where `out` is `dim` unless it is given.

    `fused`: the checkpoint stores gate and up as one matrix, `gate_up_proj`.
    """

    def __init__(
        self,
        dim: int,
        inner: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        act: str = "silu",
        fused: bool = False,
        out: int | None = None,
    ) -> None:
        super().__init__()
        self.act = act
        shards = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(dim, shards, bias, dtype, device)
        self.down = Linear(inner, {"down_proj": out or dim}, bias, dtype, device)

    def forward(self, x: Tensor, modality_ids: Tensor | None = None) -> Tensor:
        """`modality_ids` is ignored; it has a meaning in `layers.moe`."""
        return self.down(act_and_mul(self.act, self.gate_up(x)))


def gated_mlp_bytes(width: int, inner: int, limits: StepLimits, dtype: torch.dtype, out: int | None = None) -> int:
    """Bytes per row alive in GatedMlp, without its input."""
    s = dtype.itemsize
    activated = 0 if fused("act_and_mul", limits.device, dtype) else inner * s
    return max(
        linear_bytes(width, 2 * inner, limits.rows, dtype, limits),
        activated + linear_result(2 * inner, limits.rows, dtype, limits) + inner * s,  # gate and up, their product
        inner * s + linear_bytes(inner, out or width, limits.rows, dtype, limits),
    )
