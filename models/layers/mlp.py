"""The gated MLP of decoders and some towers. Knows no residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.activation import gated
from .linear import Linear


class GatedMlp(nn.Module):
    """`down(act(gate(x)) * up(x))`, `[rows, dim] -> [rows, dim]`.

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
    ) -> None:
        super().__init__()
        self.act = act
        slices = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(dim, slices, bias, dtype, device)
        self.down = Linear(inner, {"down_proj": dim}, bias, dtype, device)

    def forward(self, x: Tensor, kinds: Tensor | None = None) -> Tensor:
        """`kinds` tells rows apart in mixtures (`layers.moe`); here all are alike."""
        return self.down(gated(self.act, self.gate_up(x)))  # type: ignore[no-any-return]
