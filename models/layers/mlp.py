"""The MLPs of decoders and of some towers, with a gate and without."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.activation import act_and_mul, activation
from ..memory_formulas import OpBytes
from .adapter import NO_ADAPTERS, AdapterBytes
from .basic import TensorModule
from .linear import Linear, gathered_linear
from .ranks import Ranks, Rows, building_for


class GatedMlp(TensorModule):
    """`down(act(gate(x)) * up(x))`, `[rows, dim] -> [rows, out]`, where `out` is `dim` unless it is given.

    `fused`: the checkpoint stores gate and up as one matrix, `gate_up_proj`. `sparsity`,
    `multipliers`: as in MlpSpec. `ranks`: those that divide the inner numbers and the outputs; `ranks.size` divides `inner`.
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
        sparsity: float = 0.0,
        multipliers: tuple[float, float] = (1.0, 1.0),
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.act, self.multipliers, self.ranks = act, multipliers, ranks
        quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(sparsity)) if sparsity else torch.tensor(0.0)
        self.cut = float(quantile.to(dtype)) if sparsity else None  # in standard deviations
        part = slice(0, inner) if ranks is None else ranks.part(inner)
        self.sent_bytes = 0 if ranks is None else (part.stop - part.start) * dtype.itemsize  # see ranks.rank_traffic
        rows = {"gate_proj": Rows(inner, (part,)), "up_proj": Rows(inner, (part,))}
        if fused:
            rows = {"gate_up_proj": Rows(2 * inner, (part, slice(inner + part.start, inner + part.stop)))}
        shards = {name: len(held.slices) * (part.stop - part.start) for name, held in rows.items()}
        self.gate_up = Linear(dim, shards, bias, dtype, device, rows={} if ranks is None else rows)
        with building_for(ranks):
            self.down = gathered_linear(inner, ("down_proj", out or dim), bias, dtype, device)

    def forward(self, x: Tensor, modality_ids: Tensor | None = None) -> Tensor:
        """Run the MLP. `modality_ids` is ignored; `layers.moe` uses it."""
        hidden = self.gate_up(x)
        if self.cut is not None:
            _cut_(hidden[:, : hidden.shape[1] // 2], self.cut)
        gate, out = self.multipliers
        if gate != 1.0:
            hidden[:, : hidden.shape[1] // 2].mul_(gate)
        hidden = act_and_mul(self.act, hidden)
        result = self.down(hidden if self.ranks is None else self.ranks.gather(hidden))
        return result if out == 1.0 else result.mul_(out)


def _cut_(gate: Tensor, deviations: float) -> None:
    """Subtract mean + `deviations` standard deviations of each row, in place, and cut negative numbers to zero."""
    gate.sub_(gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * deviations).relu_()


class PlainMlp(TensorModule):
    """`down(act(up(x)))`, `[rows, dim] -> [rows, dim]`. `names`: of both layers in the checkpoint. `ranks`: as in GatedMlp."""

    def __init__(
        self,
        dim: int,
        inner: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        act: str,
        names: tuple[str, str],
        *,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.act, self.ranks = act, ranks
        part = slice(0, inner) if ranks is None else ranks.part(inner)
        self.sent_bytes = 0 if ranks is None else (part.stop - part.start) * dtype.itemsize  # see ranks.rank_traffic
        rows = {} if ranks is None else {names[0]: Rows(inner, (part,))}
        self.up = Linear(dim, {names[0]: part.stop - part.start}, bias, dtype, device, rows=rows)
        with building_for(ranks):
            self.down = gathered_linear(inner, (names[1], dim), bias, dtype, device)

    def forward(self, x: Tensor, modality_ids: Tensor | None = None) -> Tensor:
        """Run the MLP. `modality_ids` is ignored, as in GatedMlp."""
        hidden = activation(self.act, self.up(x))
        return self.down(hidden if self.ranks is None else self.ranks.gather(hidden))


def gated_mlp_bytes(width: int, inner: int, ops: OpBytes, out: int | None = None, adapters: AdapterBytes = NO_ADAPTERS) -> int:
    """Return the bytes per row alive in GatedMlp, without its input. In torch the activated gate is a tensor of its own."""
    s, rows, out = ops.dtype.itemsize, ops.limits.rows, out or width
    gate = 0 if ops.fused("act_and_mul") else inner * s
    wide = ops.linear_result(2 * inner, rows)
    adapted = max(wide + adapters.first, inner * s + ops.linear_result(out, rows) + adapters.last)
    return max(ops.mlp(width, 2 * inner, inner, rows, out), wide + inner * s + gate, adapted)


def plain_mlp_bytes(width: int, inner: int, ops: OpBytes, adapters: AdapterBytes = NO_ADAPTERS) -> int:
    """Return the bytes per row alive in PlainMlp, without its input. In torch an activation may need a tensor of its own."""
    s, rows = ops.dtype.itemsize, ops.limits.rows
    wide, scratch = ops.linear_result(inner, rows), 0 if ops.fused("activation") else inner * s
    adapted = max(wide + adapters.first, inner * s + ops.linear_result(width, rows) + adapters.last)
    return max(ops.mlp(width, inner, inner, rows), wide + inner * s + scratch, adapted)
