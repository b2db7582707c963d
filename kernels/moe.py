"""Which experts a row goes to, and rows in the order of their experts: torch, and Triton where experts lie side by side.

Nothing here, nor the sum of a row's experts, depends on which other rows are in the step: scores, choices and sums are made
row by row, each sum in the order of the row's own choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .activation import gated_reference
from .dispatch import backend
from .fp8 import Fp8, fp8_linear_reference
from .int8 import Int8, int8_linear_reference


@dataclass(frozen=True)
class Routing:
    """How a router's logits become weights of `top_k` experts; see `models.text.spec.MoeSpec`."""

    top_k: int
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"


@dataclass(frozen=True, eq=False)
class Stacked:
    """One linear layer of every expert.

    Args:
        weight: `[experts, out, in]`. bias: `[experts, out]`, or None.
        scale: float32 `[experts, out]` where the weight is in 8 bits (`int8.Int8`, `fp8.Fp8`), or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Experts:
    """Gated MLPs of one shape side by side, `down(act(gate(x)) * up(x))`; `gate_up` gives `[gate | up]`.

    `act`: a name of `activation.REFERENCES`.
    """

    act: str
    gate_up: Stacked
    down: Stacked


def route(logits: Tensor, rule: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Float32 `logits [rows, experts]` -> float32 weights and the experts' numbers, `[rows, top_k]` each, the best first.

    `correction`: float32 `[experts]`, added to the scores for the choice alone. Numbers are int64, in Triton int32.
    """
    if backend("moe", logits.device, logits.dtype) == "triton":
        from .gpu import moe

        return moe.route(logits, rule, correction)
    return route_reference(logits, rule, correction)


def route_reference(logits: Tensor, rule: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `route`."""
    scores = logits.softmax(-1) if rule.scoring == "softmax" else _sigmoid(logits)
    offered = scores if correction is None else scores + correction
    if rule.groups > 1:
        offered = _best_groups(offered, rule)
    chosen = offered.topk(rule.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if rule.normalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=1e-20)
    return weights * rule.scale, chosen


def _sigmoid(x: Tensor) -> Tensor:
    """As a softmax against 0, which is computed alike for every element, wherever it lies."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _best_groups(offered: Tensor, rule: Routing) -> Tensor:
    """Scores of experts outside the best groups become -inf."""
    grouped = offered.unflatten(1, (rule.groups, -1))
    counts = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    best = counts.topk(rule.top_groups, -1).indices
    outside = torch.ones_like(counts, dtype=torch.bool).scatter_(1, best, False)
    kept: Tensor = grouped.masked_fill(outside[..., None], -torch.inf)
    return kept.flatten(1)


def mix_reference(x: Tensor, weights: Tensor, chosen: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Row by row: what `mix` computes."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, (own, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, number in zip(own, experts, strict=True):
            out[row] += expert(number, x[row : row + 1])[0].float() * weight
    return out.to(x.dtype)


def mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """`x [rows, dim]` through `expert(number, rows)`, one call for all rows of an expert, and the weighted sums."""
    order = chosen.flatten().argsort(stable=True)
    made = x.new_empty(len(order), x.shape[1])
    for number, start, end in _runs(torch.bincount(chosen.flatten(), minlength=experts).tolist()):
        made[start:end] = expert(number, x.index_select(0, order[start:end] // chosen.shape[1]))
    where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view(chosen.shape)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place, weight in zip(where.unbind(1), weights.unbind(1), strict=True):
        out += made.index_select(0, place) * weight[:, None]
    return out.to(x.dtype)


def mix_experts(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts, out: Tensor | None = None) -> Tensor:
    """As `mix` for experts that lie side by side, without a look at the choices on the host.

    Args:
        chosen: int32 `[rows, top_k]`; rows whose first expert is -1 are skipped.
        out: `[rows, dim]`, where the others are written; None: all are, to new memory.
    """
    from .gpu import moe

    return moe.mix_experts(x, weights, chosen, experts, out)


def expert_reference(experts: Experts, number: int, x: Tensor) -> Tensor:
    """`x [rows, dim]` through one expert: two products, each rounded to x's dtype, as the activation is."""
    return _product(gated_reference(experts.act, _product(x, experts.gate_up, number)), experts.down, number)


def _product(x: Tensor, layer: Stacked, number: int) -> Tensor:
    bias = None if layer.bias is None else layer.bias[number]
    if layer.scale is None:
        return F.linear(x, layer.weight[number], bias)
    if layer.weight.dtype == torch.int8:
        return int8_linear_reference(x, Int8(layer.weight[number], layer.scale[number], bias))
    return fp8_linear_reference(x, Fp8(layer.weight[number], layer.scale[number], bias))


def _runs(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """`(expert, first, end)` of every expert that has rows: [2, 0, 3] gives (0, 0, 2), (2, 2, 5)."""
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, start, start + count
        start += count
